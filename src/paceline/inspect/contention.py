"""Whether ranks on CPUs had to share cores, so that they waited for each other without communicating."""

from paceline.inspect.facts import RunFacts

CONTENTION_SHARE = 0.05  # of the time, in which a rank waits for a core; each such wait delays all ranks


def find_contention(facts: RunFacts) -> str | None:
    """Return why ranks on CPUs wait for each other without communicating, or None."""
    started = facts.started
    cores, ranks = facts.facts.get("cores"), facts.facts.get("local_ranks", 1.0)
    if started is not None and cores and ranks * started.threads > cores:
        return "ranks that share cores wait for each other, which is not communication"
    waits = [
        beat.core_wait_s / max(1e-9, sum(beat.total_s.values()))
        for beat in facts.beats
        if beat is not None and beat.core_wait_s is not None and beat.total_s
    ]
    if waits and max(waits) > CONTENTION_SHARE:
        return (
            f"a rank waited for a core for {max(waits):.0%} of the time, since other programs use the cores, "
            "and the other ranks waited for it"
        )
    return None

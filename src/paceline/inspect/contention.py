"""Whether ranks on CPUs had to share cores, so that they waited for each other without communicating."""

from paceline.doctor.heartbeat import Heartbeat
from paceline.inspect.facts import RunFacts

CONTENTION_SHARE = 0.05  # of the time, in which a rank waits for a core; each such wait delays all ranks


def measure_core_wait(beat: Heartbeat | None) -> float | None:
    """Return the share of the time in which a rank could run and had no core; None if unknown."""
    if beat is None or beat.core_wait_s is None or not beat.total_s:
        return None
    return beat.core_wait_s / max(1e-9, sum(beat.total_s.values()))


def measure_contention(facts: RunFacts) -> float | None:
    """Return the largest share of the time in which a rank waited for a core; None if unknown."""
    shares = [share for beat in facts.beats if (share := measure_core_wait(beat)) is not None]
    return max(shares, default=None)


def measure_explained_wait(facts: RunFacts) -> float:
    """Return the largest share of a step that waiting for cores can explain: that of all ranks in turn."""
    return sum(measure_core_wait(beat) or 0.0 for beat in facts.beats)


def find_contention(facts: RunFacts) -> str | None:
    """Return why ranks on CPUs wait for each other without communicating, or None."""
    started = facts.started
    cores, ranks = facts.facts.get("cores"), facts.facts.get("local_ranks", 1.0)
    if started is not None and cores and ranks * started.threads > cores:
        return "ranks that share cores wait for each other, which is not communication"
    share = measure_contention(facts)
    if share is not None and share > CONTENTION_SHARE:
        return (
            f"a rank waited for a core for {share:.0%} of the time, since other programs use the cores, "
            "and the other ranks waited for it"
        )
    return None

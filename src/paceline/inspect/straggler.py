"""The rank for which the others wait: by the time that it works for itself, without its collectives."""

import statistics
from typing import NamedTuple

from paceline.doctor.heartbeat import BACKWARD, DATA, FORWARD, OWN_CODE, UPDATE
from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Missing
from paceline.plan.plan import ResolvedPlan

STEP_PHASES = (DATA, FORWARD, BACKWARD, UPDATE, OWN_CODE)
MIN_STEPS = 20  # in the sums of a heartbeat
MIN_PROFILES = 3  # that name the same straggler; a single profile may show a pause of the machine
CLEAR_RATIO = 3.0  # of the busy time in fewer profiles, if the median step takes at least as long
SLOW_RATIO = 1.5  # of the busy time of a rank, relative to the median of the others
SLOW_SHARE = 0.15  # of the step, by which it is slower
SLOW_S = 2e-3  # less is noise of the scheduler of the operating system
# A rank that is less slow than that, over more steps, by more than all its waiting for a core.
MILD_STEPS, MILD_RATIO, MILD_SHARE, MILD_S = 80, 1.15, 0.1, 4e-3


class RankTimes(NamedTuple):
    """Seconds per step in which a rank works for itself, and where."""

    own_s: float
    data_s: float
    wait_s: float  # for a core, which other ranks of the machine might have instead


def _read_rank_times(facts: RunFacts) -> list[RankTimes] | None:
    """Return the own time of each rank from the heartbeats; None if a rank lacks it.

    The backward pass, and under most plans the forward pass too, contain waiting for other ranks."""
    plan = facts.plan
    if plan is None or not facts.beats:
        return None
    has_own_forward = _has_own_forward(plan)
    beats = [beat for beat in facts.beats if beat is not None and beat.total_steps >= MIN_STEPS]
    if len(beats) < len(facts.beats):
        return None
    is_one_machine = len({beat.host for beat in beats}) == 1
    times = []
    for beat in beats:
        data_s = beat.total_s.get(DATA, 0.0) / beat.total_steps
        forward_s = beat.total_s.get(FORWARD, 0.0) / beat.total_steps
        forward_s += beat.total_s.get(OWN_CODE, 0.0) / beat.total_steps  # of a loop of the user
        own_s = data_s + (forward_s if has_own_forward else 0.0)
        wait_s = (beat.core_wait_s or 0.0) / beat.total_steps if is_one_machine else 0.0
        times.append(RankTimes(own_s, data_s, wait_s))
    return times


def _count_steps(facts: RunFacts) -> tuple[float, int]:
    """Return the mean time of a step by the heartbeat of the first rank, and the number of these steps."""
    beat = facts.beats[0]
    assert beat is not None
    return sum(beat.total_s.get(phase, 0.0) for phase in STEP_PHASES) / beat.total_steps, beat.total_steps


class Straggler(NamedTuple):
    rank: int
    busy_s: float
    others_s: float
    step_s: float
    where: str  # "input", "computing" or "" if unknown

    @property
    def share(self) -> float:
        return min(1.0, (self.busy_s - self.others_s) / self.step_s) if self.step_s else 0.0


def find_straggler(facts: RunFacts) -> Straggler | Missing | None:
    """Return the rank for which the others wait, None if there is none."""
    times = _read_rank_times(facts)
    found = _find_by_heartbeat(times, *_count_steps(facts)) if times is not None else None
    found = found or _find_by_profiles(facts)
    if found is not None or (times is not None and _has_own_forward(facts.plan)):
        return found
    if len(facts.profiled) >= MIN_PROFILES:
        return None
    needed = f"it needs {MIN_STEPS} steps after the first with heartbeats of all ranks"
    if not _has_own_forward(facts.plan):
        needed += f", and {MIN_PROFILES} profiles (--profile): under {facts.start.plan}, the forward pass "
        needed += "waits for other ranks"
    return Missing(needed)


def _find_by_profiles(facts: RunFacts) -> Straggler | None:
    num_ranks, profiles = facts.start.ranks, facts.profiled
    if num_ranks < 2 or not profiles:
        return None
    rank, count = _most_common([event.slowest for event in profiles])
    if 2 * count <= len(profiles):
        return None
    own = [event for event in profiles if event.slowest == rank]
    busy_s = statistics.median(event.slowest_s for event in own)
    others_s = statistics.median(
        max(0.0, (event.busy_s * num_ranks - event.slowest_s) / (num_ranks - 1)) for event in own
    )
    straggler = Straggler(rank, busy_s, others_s, statistics.median(event.step_s for event in own), "")
    if not _is_slow(straggler):
        return None
    # The machine may have paused in a single profile; then most steps take less time.
    is_clear = busy_s > CLEAR_RATIO * others_s and facts.step_s is not None and facts.step_s > busy_s
    return straggler if len(profiles) >= MIN_PROFILES or is_clear else None


def _has_own_forward(plan: ResolvedPlan | None) -> bool:
    """Return whether the forward pass of a plan has no collectives, so that its time is a rank's own."""
    return plan is not None and plan.zero <= 1 and plan.tp == plan.pp == plan.cp == 1


def _find_by_heartbeat(times: list[RankTimes], step_s: float, num_steps: int) -> Straggler | None:
    slowest = max(range(len(times)), key=lambda rank: times[rank].own_s)
    others = [entry for rank, entry in enumerate(times) if rank != slowest]
    if not others:
        return None
    own = times[slowest]
    others_s = statistics.median(entry.own_s for entry in others)
    # Other programs used a core of this rank: what it waited more than the others is not its work.
    waited_s = max(0.0, own.wait_s - statistics.median(entry.wait_s for entry in others))
    busy_s = max(others_s, own.own_s - waited_s)
    reading_s = own.data_s - statistics.median(entry.data_s for entry in others)
    where = "input" if 2 * reading_s > own.own_s - others_s else "computing"
    straggler = Straggler(slowest, busy_s, others_s, step_s, where)
    certain = straggler._replace(busy_s=max(others_s, own.own_s - own.wait_s))
    is_mild = num_steps >= MILD_STEPS and _is_slow(certain, MILD_RATIO, MILD_SHARE, MILD_S)
    return straggler if is_mild or _is_slow(straggler) else None


def _is_slow(
    straggler: Straggler, ratio: float = SLOW_RATIO, share: float = SLOW_SHARE, seconds: float = SLOW_S
) -> bool:
    return (
        straggler.busy_s > ratio * straggler.others_s
        and straggler.share > share
        and straggler.busy_s - straggler.others_s > seconds
    )


def _most_common(numbers: list[int]) -> tuple[int, int]:
    number = statistics.mode(numbers)
    return number, numbers.count(number)

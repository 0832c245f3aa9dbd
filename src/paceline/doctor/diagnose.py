"""The diagnosis of a run from the states of its ranks: which rank blocks it, where and since when.

Pure functions.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.doctor import heartbeat
from paceline.doctor.heartbeat import Collective, Frame, Heartbeat
from paceline.doctor.rank_state import RankState, ReaderProcess
from paceline.units import format_seconds, several

# A healthy run shows progress within the larger of these two.
MIN_STALL_S = 3.0
STALL_STEPS = 5  # times its longest step
SLOW_RATIO = 1.5  # a rank is slow if its time in a phase exceeds this multiple of the other ranks' median
MAX_RANKS_NAMED = 3  # in a sentence

PACKAGE = os.path.dirname(os.path.dirname(__file__))
TASKS = os.path.join(PACKAGE, "tasks")
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3\.|^<frozen")
TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    "char": "int8",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    verdict: str  # "healthy", "starting", "stuck"
    sentence: str
    hint: str  # "" if none is needed
    at_fault: tuple[int, ...]  # ranks
    still_s: float  # seconds since any rank made progress
    step: int
    seen: tuple[RankState, ...]


def stalled_s(beats: Sequence[Heartbeat | None], now: float) -> float:
    """Return the seconds since a rank last entered a phase."""
    return max(0.0, now - max((beat.since for beat in beats if beat is not None), default=now))


def shortest_patience_s(beats: Sequence[Heartbeat | None]) -> float | None:
    """Return the shortest time that a rank waits for another rank; None if no rank waits."""
    return min(
        (beat.patience_s for beat in beats if beat is not None and beat.patience_s is not None), default=None
    )


def stall_threshold_s(beats: Sequence[Heartbeat | None], on_request: bool) -> float | None:
    """Return the seconds without progress after which a stall is reported; None: never.

    on_request: a user asks for the state now. Otherwise the threshold is at least half the time that ranks
    wait for one another."""
    running = [
        beat
        for beat in beats
        if beat is not None and beat.phase != heartbeat.ENDED and beat.patience_s is not None
    ]
    if not running:
        return None
    threshold = max(MIN_STALL_S, STALL_STEPS * max(beat.longest_s for beat in running))
    has_stepped = any(beat.stepped is not None for beat in running)
    if on_request and has_stepped:
        return threshold
    return max(threshold, (shortest_patience_s(running) or 0.0) / 2)


def diagnose(ranks: Sequence[RankState], now: float, threshold_s: float | None) -> Diagnosis:
    """Return the diagnosis of a run.

    threshold_s: seconds without progress after which the run is stuck; None: never."""
    beats = [rank.beat for rank in ranks]
    still_s = stalled_s(beats, now)
    step = max((beat.step for beat in beats if beat is not None), default=0)
    stepped = max(
        (beat.stepped for beat in beats if beat is not None and beat.stepped is not None), default=None
    )

    def conclude(verdict: str, sentence: str, hint: str = "", at_fault: Sequence[int] = ()) -> Diagnosis:
        return Diagnosis(
            verdict=verdict,
            sentence=sentence,
            hint=hint,
            at_fault=tuple(at_fault),
            still_s=still_s,
            step=step,
            seen=tuple(ranks),
        )

    unable = [
        rank
        for rank in ranks
        if rank.state in ("stopped", "gone", "silent")
        and (rank.beat is None or rank.beat.patience_s is not None)
    ]
    if unable or (threshold_s is not None and still_s > threshold_s):
        at_fault = unable or _find_at_fault(ranks)
        return conclude(
            "stuck",
            _explain_stall(ranks, at_fault, still_s, now),
            _build_hint(at_fault, beats),
            [rank.rank for rank in at_fault],
        )
    if stepped is None:
        latest = max(
            (rank for rank in ranks if rank.beat is not None),
            key=lambda rank: rank.beat.since if rank.beat else 0.0,
        )
        missing = [rank.rank for rank in ranks if rank.state == "missing"]
        reason = (
            f"rank {missing[0]} has not started"
            if missing
            else f"rank {latest.rank} {_describe_activity(latest, now)}"
        )
        return conclude("starting", f"no step has ended yet; {reason}")
    slow = _find_slow(beats)
    steps = next((f" of {beat.steps}" for beat in beats if beat is not None and beat.steps is not None), "")
    healthy = (
        f"healthy: step {step}{steps}, the last step ended {format_seconds(max(0.0, now - stepped))} ago"
    )
    return conclude("healthy", "; ".join([healthy, *slow]))


def describe_location(stack: Sequence[Frame]) -> str | None:
    """Return the innermost line of a stack that is not in a library; None if there is none."""
    for frame in reversed(stack):
        if frame.file.startswith(PACKAGE) and not frame.file.startswith(TASKS):
            return f"{frame.function} ({os.path.relpath(frame.file, os.path.dirname(PACKAGE))}:{frame.line})"
        if frame.file.endswith("dataloader.py") and frame.function.endswith("__next__"):
            return "DataLoader.__next__"
        if not LIBRARY.search(frame.file):
            return f"{frame.function} ({os.path.basename(frame.file)}:{frame.line})"
    return None


def find_wait(rank: RankState, ranks: Sequence[RankState]) -> Collective | str | None:
    """Return the collective or call in which a rank waits for another rank; None if it does not wait."""
    if rank.beat is None or rank.state != "runs" or rank.beat.phase == heartbeat.DATA:
        return None
    innermost = rank.stack[-1] if rank.stack else None
    if (
        innermost is not None
        and not LIBRARY.search(innermost.file)
        and not innermost.file.startswith(PACKAGE)
    ):
        return None
    waiting = [
        collective
        for collective in rank.collectives
        if not collective.is_over and _find_behind(collective, ranks)
    ]
    if waiting:
        return min(waiting, key=lambda collective: collective.called)
    # torch 2.13: gloo's flight recorder does not record messages between two ranks.
    if innermost is not None and "/torch/distributed/" in innermost.file:
        return f"{innermost.function} ({os.path.basename(innermost.file)}:{innermost.line})"
    return None


def _find_pending(rank: RankState) -> Collective | None:
    """Return the last collective that the rank has called and not finished."""
    if rank.beat is None or rank.beat.phase == heartbeat.DATA:
        return None
    return max(
        (collective for collective in rank.collectives if not collective.is_over),
        key=lambda collective: collective.called,
        default=None,
    )


def _find_behind(collective: Collective, ranks: Sequence[RankState]) -> list[int]:
    """Return the members that have not called the collective, or did not answer."""
    numbers = {rank.rank: _last_number(rank, collective) for rank in ranks if rank.answered}
    return [member for member in collective.members if numbers.get(member, -1) < collective.number]


def _last_number(rank: RankState, like: Collective) -> int:
    """Return the number of the rank's last collective in the same group and of the same kind; 0 if none."""
    return next(
        (
            collective.number
            for collective in rank.collectives
            if (collective.group, collective.kind) == (like.group, like.kind)
        ),
        0,
    )


def _find_at_fault(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that wait for no other rank while others wait."""
    not_waiting = [rank for rank in ranks if rank.state == "runs" and find_wait(rank, ranks) is None]
    missing = [rank for rank in ranks if rank.state == "missing"]
    if len(not_waiting) < len(ranks):
        return missing + not_waiting
    # All ranks have called a collective: different ones, or the last message is still being sent.
    if all(map(_find_pending, not_waiting)):
        return []
    # Nothing is known of collectives: compare the steps instead.
    steps = {rank.rank: rank.beat.step for rank in not_waiting if rank.beat is not None}
    reading = [
        rank
        for rank in not_waiting
        if rank.beat is not None
        and rank.beat.phase == heartbeat.DATA
        and steps[rank.rank] == min(steps.values())
    ]
    return reading if 0 < len(reading) < len(not_waiting) else not_waiting


def _explain_stall(
    ranks: Sequence[RankState], at_fault: Sequence[RankState], still_s: float, now: float
) -> str:
    duration = format_seconds(still_s)
    if not at_fault:
        waits = {
            rank.rank: wait
            for rank in ranks
            if (wait := find_wait(rank, ranks) or _find_pending(rank)) is not None
        }
        return _explain_mutual_wait(waits, duration)
    waits = {
        rank.rank: wait
        for rank in ranks
        if rank not in at_fault and (wait := find_wait(rank, ranks)) is not None
    }
    culprits = "; ".join(
        f"rank {rank.rank} {_describe_activity(rank, now)}{_describe_lag(rank, waits)}"
        for rank in at_fault[:MAX_RANKS_NAMED]
    )
    if len(at_fault) > MAX_RANKS_NAMED:
        culprits += f"; and {len(at_fault) - MAX_RANKS_NAMED} more"
    if not waits:
        return f"{culprits}; no rank has made progress for {duration}"
    counts = Counter(map(_describe_wait, waits.values()))
    place, count = counts.most_common(1)[0]
    called = min(
        (wait.called for wait in waits.values() if isinstance(wait, Collective)), default=now - still_s
    )
    waiting = (
        "the others wait" if count == len(ranks) - len(at_fault) > 1 else f"rank {_first(waits, place)} waits"
    )
    return f"{culprits}; {waiting} in {place} for {format_seconds(max(0.0, now - called))}"


def _explain_mutual_wait(waits: "dict[int, Collective | str]", duration: str) -> str:
    """Return the sentence for a run in which all ranks wait for one another."""
    places = Counter(map(_describe_wait, waits.values()))
    if len(places) > 1:
        examples = "; ".join(
            f"rank {_first(waits, place)} in {place}" for place in list(places)[:MAX_RANKS_NAMED]
        )
        return f"the ranks wait for one another in different places for {duration}: {examples}"
    if places:
        return (
            f"all ranks wait in {next(iter(places))} for {duration}, and none is behind: "
            "the network between them is at fault"
        )
    return f"no rank has made progress for {duration}, and none answers"


def _first(waits: "dict[int, Collective | str]", place: str) -> int:
    return next(rank for rank, wait in waits.items() if _describe_wait(wait) == place)


def _describe_wait(wait: Collective | str) -> str:
    if isinstance(wait, str):
        return wait
    return f"{wait.operation} of {wait.items:,} {TYPES.get(wait.dtype, wait.dtype)}"


def _describe_lag(rank: RankState, waits: "dict[int, Collective | str]") -> str:
    """Return by how many collectives the rank is behind those that wait; "" if by none."""
    if not rank.answered:
        return ""
    lags = [
        wait.number - _last_number(rank, wait)
        for wait in waits.values()
        if isinstance(wait, Collective) and rank.rank in wait.members
    ]
    lag = max(lags, default=0)
    return f" and {several(lag, 'collective')} behind" if lag > 0 else ""


def _describe_activity(rank: RankState, now: float) -> str:
    """Return a predicate that follows the words "rank N"."""
    if rank.beat is None:
        return "has not started"
    process = f"process {rank.beat.pid} on {rank.beat.host}"
    ago = format_seconds(max(0.0, now - rank.beat.time))
    match rank.state:
        case "stopped":
            return f"is stopped by a signal ({process})"
        case "gone":
            step = rank.beat.step + 1
            return f"ended without an error message ({process}), in {rank.beat.phase} of step {step}"
        case "silent":
            return f"sent no heartbeat for {ago} ({process}): it cannot run, or its machine cannot be reached"
    duration = f"for {format_seconds(max(0.0, now - rank.beat.since))}"
    location = describe_location(rank.stack)
    if location is None:
        return f"does not answer ({process}), in {rank.beat.phase} {duration}"
    reader = next(filter(_is_busy, rank.readers), None)
    if location == "DataLoader.__next__" and reader is not None:
        activity = "is stopped" if reader.state == "stopped" else f"is in {describe_location(reader.stack)}"
        return f"is in {location} {duration}, for its reader (process {reader.pid}), which {activity}"
    return f"is in {location} {duration}"


def _is_busy(reader: ReaderProcess) -> bool:
    location = describe_location(reader.stack)
    return reader.state == "stopped" or (
        location is not None and "worker" not in location and "data/workers.py" not in location
    )


def _build_hint(at_fault: Sequence[RankState], beats: Sequence[Heartbeat | None]) -> str:
    stopped = [rank.beat.pid for rank in at_fault if rank.state == "stopped" and rank.beat is not None]
    if stopped:
        return f"resume it with: kill -CONT {' '.join(map(str, stopped))}"
    patience_s = shortest_patience_s(beats)
    if patience_s is None or len(beats) < 2:
        return ""
    return f"ranks wait at most {format_seconds(patience_s)} for one another, then all end"


def _find_slow(beats: Sequence[Heartbeat | None]) -> list[str]:
    """Return a sentence for each rank that is slower than the others in data or in the forward pass.

    The difference is at least a tenth of a step."""
    sentences = []
    known = [beat for beat in beats if beat is not None]
    for beat in known if len(known) > 1 else ():
        for phase in (heartbeat.DATA, heartbeat.OWN_CODE, heartbeat.FORWARD):
            spent_s = beat.spent_s.get(phase, 0.0)
            others_s = median(other.spent_s.get(phase, 0.0) for other in known if other is not beat)
            if spent_s > SLOW_RATIO * others_s and spent_s - others_s > 0.1 * sum(beat.spent_s.values()):
                sentences.append(
                    f"rank {beat.rank} is slow: {format_seconds(spent_s)} a step in {phase}, "
                    f"the others {format_seconds(others_s)}"
                )
    return sentences[:MAX_RANKS_NAMED]

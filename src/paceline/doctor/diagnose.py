"""From what is known of each rank to one sentence: who keeps the run, where, and since when. Pure functions."""

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

STILL_S = 3.0  # nothing of a healthy run is without a sign for so long,
TIMES = 5  # or for so many of its longest steps
SLOW = 1.5  # times what the others take of its own for a step
SHOWN = 3  # ranks in a sentence

OWN = os.path.dirname(os.path.dirname(__file__))
TASKS = os.path.join(OWN, "tasks")
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
    hint: str  # "" where none is needed
    at_fault: tuple[int, ...]  # ranks
    still_s: float  # since any rank showed a sign
    step: int
    seen: tuple[RankState, ...]


def still_s(beats: Sequence[Heartbeat | None], now: float) -> float:
    """For how long no rank has gone on to another phase."""
    return max(0.0, now - max((one.since for one in beats if one is not None), default=now))


def patience_s(beats: Sequence[Heartbeat | None]) -> float | None:
    """Of the rank that waits least for another one; None where none does."""
    return min(
        (one.patience_s for one in beats if one is not None and one.patience_s is not None), default=None
    )


def bound_s(beats: Sequence[Heartbeat | None], soon: bool) -> float | None:
    """From when on that is worth a word: half of what the ranks wait for one another, or `soon`, as somebody asks. None: never."""
    going = [
        one
        for one in beats
        if one is not None and one.phase != heartbeat.ENDED and one.patience_s is not None
    ]
    if not going:
        return None
    least = max(STILL_S, TIMES * max(one.longest_s for one in going))
    stepped = any(one.stepped is not None for one in going)
    return least if soon and stepped else max(least, (patience_s(going) or 0.0) / 2)


def diagnose(seen: Sequence[RankState], now: float, bound: float | None) -> Diagnosis:
    """bound: seconds without a sign from which on a run counts as stuck; None: none."""
    beats = [one.beat for one in seen]
    still = still_s(beats, now)
    step = max((one.step for one in beats if one is not None), default=0)
    stepped = max((one.stepped for one in beats if one is not None and one.stepped is not None), default=None)

    def found(verdict: str, sentence: str, hint: str = "", at_fault: Sequence[int] = ()) -> Diagnosis:
        return Diagnosis(
            verdict=verdict,
            sentence=sentence,
            hint=hint,
            at_fault=tuple(at_fault),
            still_s=still,
            step=step,
            seen=tuple(seen),
        )

    unable = [
        one
        for one in seen
        if one.state in ("stopped", "gone", "silent")
        and (one.beat is None or one.beat.patience_s is not None)
    ]
    if unable or (bound is not None and still > bound):
        at_fault = unable or _at_fault(seen)
        return found(
            "stuck",
            _sentence(seen, at_fault, still, now),
            _hint(at_fault, beats),
            [one.rank for one in at_fault],
        )
    if stepped is None:
        first = max(
            (one for one in seen if one.beat is not None), key=lambda one: one.beat.since if one.beat else 0.0
        )
        missing = [one.rank for one in seen if one.state == "missing"]
        what = f"rank {missing[0]} is not there yet" if missing else f"rank {first.rank} {_where(first, now)}"
        return found("starting", f"no step has ended yet; {what}")
    slow = _slow(beats)
    steps = next((f" of {one.steps}" for one in beats if one is not None and one.steps is not None), "")
    healthy = f"healthy: step {step}{steps}, the last one ended {format_seconds(max(0.0, now - stepped))} ago"
    return found("healthy", "; ".join([healthy, *slow]))


def place(stack: Sequence[Frame]) -> str | None:
    """Where a thread is, as its user would say it: the innermost line that is none of a library's."""
    for frame in reversed(stack):
        if frame.file.startswith(OWN) and not frame.file.startswith(TASKS):
            return f"{frame.function} ({os.path.relpath(frame.file, os.path.dirname(OWN))}:{frame.line})"
        if frame.file.endswith("dataloader.py") and frame.function.endswith("__next__"):
            return "DataLoader.__next__"
        if not LIBRARY.search(frame.file):
            return f"{frame.function} ({os.path.basename(frame.file)}:{frame.line})"
    return None


def waits(one: RankState, seen: Sequence[RankState]) -> Collective | str | None:
    """What a rank waits in for another one; None where it is on its own."""
    if one.beat is None or one.state != "runs" or one.beat.phase == heartbeat.DATA:
        return None
    innermost = one.stack[-1] if one.stack else None
    if innermost is not None and not LIBRARY.search(innermost.file) and not innermost.file.startswith(OWN):
        return None
    waiting = [mine for mine in one.collectives if not mine.is_over and _behind(mine, seen)]
    if waiting:
        return min(waiting, key=lambda mine: mine.called)
    # Messages between two ranks are not in the flight recorder of gloo (torch 2.13).
    if innermost is not None and "/torch/distributed/" in innermost.file:
        return f"{innermost.function} ({os.path.basename(innermost.file)}:{innermost.line})"
    return None


def _called(one: RankState) -> Collective | None:
    """The last collective that it is not done with."""
    if one.beat is None or one.beat.phase == heartbeat.DATA:
        return None
    return max(
        (mine for mine in one.collectives if not mine.is_over), key=lambda mine: mine.called, default=None
    )


def _behind(mine: Collective, seen: Sequence[RankState]) -> list[int]:
    """Members that have not called it, or do not say so."""
    numbers = {one.rank: _number(one, mine) for one in seen if one.answered}
    return [member for member in mine.members if numbers.get(member, -1) < mine.number]


def _number(one: RankState, like: Collective) -> int:
    return next(
        (its.number for its in one.collectives if (its.group, its.kind) == (like.group, like.kind)), 0
    )


def _at_fault(seen: Sequence[RankState]) -> list[RankState]:
    """Those that wait for nobody while others wait."""
    own = [one for one in seen if one.state == "runs" and waits(one, seen) is None]
    missing = [one for one in seen if one.state == "missing"]
    if len(own) < len(seen):
        return missing + own
    if all(map(_called, own)):  # in different ones, or the last message is under way
        return []
    steps = {
        one.rank: one.beat.step for one in own if one.beat is not None
    }  # nothing is known of collectives
    busy = [
        one
        for one in own
        if one.beat is not None
        and one.beat.phase == heartbeat.DATA
        and steps[one.rank] == min(steps.values())
    ]
    return busy if 0 < len(busy) < len(own) else own


def _sentence(seen: Sequence[RankState], at_fault: Sequence[RankState], still: float, now: float) -> str:
    since = format_seconds(still)
    if not at_fault:
        return _nobody(
            {one.rank: what for one in seen if (what := waits(one, seen) or _called(one)) is not None}, since
        )
    waiting = {
        one.rank: what for one in seen if one not in at_fault and (what := waits(one, seen)) is not None
    }
    who = "; ".join(f"rank {one.rank} {_where(one, now)}{_how_far(one, waiting)}" for one in at_fault[:SHOWN])
    if len(at_fault) > SHOWN:
        who += f"; and {len(at_fault) - SHOWN} more"
    if not waiting:
        return f"{who}; no rank has gone on for {since}"
    alike = Counter(map(_named, waiting.values()))
    what, count = alike.most_common(1)[0]
    called = min(
        (what.called for what in waiting.values() if isinstance(what, Collective)), default=now - still
    )
    whom = (
        "the others wait" if count == len(seen) - len(at_fault) > 1 else f"rank {_first(waiting, what)} waits"
    )
    return f"{who}; {whom} in {what} for {format_seconds(max(0.0, now - called))}"


def _nobody(waiting: "dict[int, Collective | str]", since: str) -> str:
    """All wait for one another."""
    alike = Counter(map(_named, waiting.values()))
    if len(alike) > 1:
        each = "; ".join(f"rank {_first(waiting, what)} in {what}" for what in list(alike)[:SHOWN])
        return f"the ranks wait for one another in different places for {since}: {each}"
    if alike:
        return f"all ranks wait in {next(iter(alike))} for {since}, and none is behind: it is the network between them"
    return f"no rank has gone on for {since}, and none answers"


def _first(waiting: "dict[int, Collective | str]", what: str) -> int:
    return next(rank for rank, its in waiting.items() if _named(its) == what)


def _named(what: Collective | str) -> str:
    if isinstance(what, str):
        return what
    return f"{what.operation} of {what.items:,} {TYPES.get(what.dtype, what.dtype)}"


def _how_far(one: RankState, waiting: "dict[int, Collective | str]") -> str:
    """By how many collectives it is behind those who wait."""
    if not one.answered:
        return ""
    behind = [
        what.number - _number(one, what)
        for what in waiting.values()
        if isinstance(what, Collective) and one.rank in what.members
    ]
    most = max(behind, default=0)
    return f" and {several(most, 'collective')} behind" if most > 0 else ""


def _where(one: RankState, now: float) -> str:
    """What goes on behind the words "rank N"."""
    if one.beat is None:
        return "has not started"
    process = f"process {one.beat.pid} on {one.beat.host}"
    ago = format_seconds(max(0.0, now - one.beat.time))
    match one.state:
        case "stopped":
            return f"is stopped by a signal ({process})"
        case "gone":
            return f"has ended without a word ({process}), in {one.beat.phase} of step {one.beat.step + 1}"
        case "silent":
            return f"has given no sign for {ago} ({process}): it cannot run, or its machine cannot be reached"
    since = f"for {format_seconds(max(0.0, now - one.beat.since))}"
    here = place(one.stack)
    if here is None:
        return f"does not answer ({process}), in {one.beat.phase} {since}"
    reader = next(filter(_is_busy, one.readers), None)
    if here == "DataLoader.__next__" and reader is not None:
        where = "is stopped" if reader.state == "stopped" else f"is in {place(reader.stack)}"
        return f"is in {here} {since}, for its reader (process {reader.pid}), which {where}"
    return f"is in {here} {since}"


def _is_busy(reader: ReaderProcess) -> bool:
    here = place(reader.stack)
    return reader.state == "stopped" or (
        here is not None and "worker" not in here and "data/workers.py" not in here
    )


def _hint(at_fault: Sequence[RankState], beats: Sequence[Heartbeat | None]) -> str:
    stopped = [one.beat.pid for one in at_fault if one.state == "stopped" and one.beat is not None]
    if stopped:
        return f"let it go on with: kill -CONT {' '.join(map(str, stopped))}"
    patience = patience_s(beats)
    if patience is None or len(beats) < 2:
        return ""
    return f"the ranks wait for one another for {format_seconds(patience)} at most, then all end"


def _slow(beats: Sequence[Heartbeat | None]) -> list[str]:
    """Ranks that take longer than the others for what a rank does on its own, at least a tenth of a step."""
    found = []
    here = [one for one in beats if one is not None]
    for one in here if len(here) > 1 else ():
        for phase in (heartbeat.DATA, heartbeat.FORWARD):
            own = one.spent_s.get(phase, 0.0)
            others = median(other.spent_s.get(phase, 0.0) for other in here if other is not one)
            if own > SLOW * others and own - others > 0.1 * sum(one.spent_s.values()):
                found.append(
                    f"rank {one.rank} is slow: {format_seconds(own)} a step in {phase}, the others {format_seconds(others)}"
                )
    return found[:SHOWN]

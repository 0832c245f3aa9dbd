"""The events of a rank in the Trace Event Format, which Perfetto and chrome://tracing read."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.training.tracing.backward_blocks import find_backward_blocks
from paceline.training.tracing.collectives import KnownNumbers, TracedCollective
from paceline.training.tracing.profiled_ops import ProfiledOp

TRAINING_THREAD = 1  # of the profiler
TRACK_GAP = 1000  # numbers of a kind of tracks

Event = dict[str, Any]


class TraceClock(NamedTuple):
    """The clock of a trace, which all ranks share.

    base_ns: time of its zero by the clock of rank 0. offset_ns: what to add to the clock of this rank.
    error_ns: the largest error of that.
    """

    base_ns: int
    offset_ns: int = 0
    error_ns: int = 0

    def microseconds(self, time_ns: int) -> float:
        """Return a time of this rank, as the format has it."""
        return (time_ns + self.offset_ns - self.base_ns) / 1000


class _Tracks:
    """Tracks of ranges that may overlap: a range goes to the first track that is free."""

    def __init__(self, first: int, name: str):
        self.first, self.name = first, name
        self.ends_ns: list[int] = []

    def place(self, op: ProfiledOp) -> int:
        for at, end_ns in enumerate(self.ends_ns):
            if end_ns <= op.begin_ns:
                self.ends_ns[at] = op.end_ns
                return self.first + at
        self.ends_ns.append(op.end_ns)
        return self.first + len(self.ends_ns) - 1

    def names(self) -> dict[int, str]:
        return {self.first + at: self.name for at in range(len(self.ends_ns))}


def build_events(
    ops: Sequence[ProfiledOp],
    collectives: Sequence[TracedCollective],
    known: Sequence[Mapping[str, KnownNumbers]],
    rank: int,
    label: str,
    clock: TraceClock,
) -> Iterator[Event]:
    """Yield the events of a rank.

    ops: in order of time, the outer ones first. collectives: of find_collectives. known: of
    find_known_numbers, by rank. label: of the rank.
    """
    names: dict[int, str] = {}
    for op in _nest([*(op for op in ops if not op.is_async), *find_backward_blocks(ops)]):
        tid = op.thread if op.stream is None else 2 * TRACK_GAP + op.stream
        names[tid] = _track_name(op)
        yield make_range(op, rank, tid, clock)
    tracks: dict[str, _Tracks] = {}
    for collective in collectives:
        title = _group_title(collective)
        if title not in tracks:
            tracks[title] = _Tracks(TRACK_GAP * (3 + len(tracks)), title)
        tid = tracks[title].place(collective.op)
        event = make_range(collective.op, rank, tid, clock) | {"cat": "collective"}
        if collective.ranks:
            event["args"] = {
                "ranks": list(collective.ranks),
                "number": collective.number,
                "shapes": collective.shapes,
            }
        yield event
        yield from _make_collective_flows(collective, known, rank, tid, clock)
    for of_group in tracks.values():
        names |= of_group.names()
    yield from _make_launch_flows(ops, rank, clock)
    yield from _make_names(names, rank, label)


def _nest(ops: list[ProfiledOp]) -> list[ProfiledOp]:
    return sorted(ops, key=lambda op: (op.begin_ns, -op.end_ns, op.kind == "op"))


def _track_name(op: ProfiledOp) -> str:
    if op.stream is not None:
        return f"stream {op.stream}"
    return "training" if op.thread == TRAINING_THREAD else f"thread {op.thread}"


def _group_title(collective: TracedCollective) -> str:
    if collective.ranks:
        first, last = collective.ranks[0], collective.ranks[-1]
        is_row = collective.ranks == tuple(range(first, last + 1))
        ranks = f"{first} to {last}" if is_row and last > first + 1 else ", ".join(map(str, collective.ranks))
        return f"collectives of ranks {ranks}"
    return (
        "messages between ranks"
        if "send" in collective.op.name or "recv" in collective.op.name
        else ("collectives of an unknown group")
    )


def make_range(op: ProfiledOp, rank: int, tid: int, clock: TraceClock) -> Event:
    """Return the event of a range on a track."""
    begin = clock.microseconds(op.begin_ns)
    duration = (op.end_ns - op.begin_ns) / 1000
    return {"ph": "X", "name": op.name, "cat": op.kind, "pid": rank, "tid": tid, "ts": begin, "dur": duration}


def _make_collective_flows(
    collective: TracedCollective,
    known: Sequence[Mapping[str, KnownNumbers]],
    rank: int,
    tid: int,
    clock: TraceClock,
) -> Iterator[Event]:
    """Yield this rank's ends of arrows on a ring: from the begin on a rank to the end on the next rank.

    No such arrow goes back in time.
    """
    if not collective.waits_for_all or rank not in collective.ranks:
        return
    at = collective.ranks.index(rank)
    before, after = collective.ranks[at - 1], collective.ranks[(at + 1) % len(collective.ranks)]
    for source, other, phase, time_ns in (
        (rank, after, "s", collective.op.begin_ns),
        (before, before, "f", max(collective.op.begin_ns, collective.op.end_ns - 1)),
    ):
        if collective.number not in known[other].get(collective.group, ()):
            continue
        key = f"{collective.group}/{collective.number}/{source}"
        yield make_flow(key, phase, collective.op.name, rank, tid, clock.microseconds(time_ns))


def make_flow(key: str, phase: str, name: str, rank: int, tid: int, ts: float) -> Event:
    """Return an end of an arrow. key: the same at both ends. phase: "s" at its start, "f" at its end."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest())
    event = {"ph": phase, "name": name, "cat": "flow", "id": number, "pid": rank, "tid": tid, "ts": ts}
    return event | ({"bp": "e"} if phase == "f" else {})


def _make_launch_flows(ops: Sequence[ProfiledOp], rank: int, clock: TraceClock) -> Iterator[Event]:
    """Yield arrows from the launch of a kernel to the kernel."""
    launches = {op.correlation: op for op in ops if op.correlation and op.stream is None}
    for op in ops:
        launch = launches.get(op.correlation) if op.stream is not None else None
        if launch is None or op.stream is None or launch.begin_ns > op.begin_ns:
            continue
        key = f"launch/{rank}/{op.correlation}"
        yield make_flow(key, "s", "launch", rank, launch.thread, clock.microseconds(launch.begin_ns))
        tid = 2 * TRACK_GAP + op.stream
        yield make_flow(key, "f", "launch", rank, tid, clock.microseconds(op.begin_ns))


def _make_names(names: Mapping[int, str], rank: int, label: str) -> Iterator[Event]:
    yield make_name("process_name", rank, 0, {"name": label})
    yield make_name("process_sort_index", rank, 0, {"sort_index": rank})
    for at, (tid, name) in enumerate(sorted(names.items())):
        yield make_name("thread_name", rank, tid, {"name": name})
        yield make_name("thread_sort_index", rank, tid, {"sort_index": at})


def make_name(name: str, rank: int, tid: int, args: Mapping[str, Any]) -> Event:
    """Return an event that describes a rank or a track."""
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": dict(args)}

"""What happened in a run, one JSON object a line: the only channel from a run to those who watch it.

A line has `time` (seconds since the epoch), `event` (started, step, profiled, evaluated, saved, failed, stalled, ended) and the fields of
that event. The figures of quick steps come together, some ten times a second: another line may stand before that of a step
which ended earlier. A run that was interrupted and resumed repeats the steps after its last checkpoint: the later line counts.
"""

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from paceline.errors import RunError
from paceline.units import several, without_controls

BLOCK = 2**18  # bytes that are read at a time
LONGEST = 2**20  # bytes of a line
PARSED = 2**23  # bytes of which each line is parsed where only a sample of the steps is wanted
LATEST = 253e9  # seconds since the epoch that a date can have
SINGLE_STEPS = 8  # of each start, which are slower than others: none of them stands for others
LAST_STEPS = 64  # that are parsed where only the end is read
KINDS_NAMED = 5  # unknown ones
# How `dumps` begins the line of a step, and what stands between two lines: found without parsing them.
_HEAD, _STEP, _SEAM = b'{"time": ', b'"event": "step", ', b'}\n{"time": '


@dataclass(frozen=True, kw_only=True)
class Event:
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    task: str
    plan: str
    ranks: int
    batch: int  # samples of a global batch
    step: int  # steps done before: 0, or those of the checkpoint that was resumed
    steps: int  # the run is done after so many
    samples: int  # in one epoch
    parameters: int
    device: str
    precision: str
    threads: int  # of torch, on each rank
    notes: tuple[str, ...] = ()  # what the user should know of how it is done
    lr_group: str = ""  # parameter group whose learning rate the steps have, where groups have different ones
    start_s: Mapping[str, float] = field(
        default_factory=dict
    )  # how long each phase of the start took, in their order


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    step: int  # counted from 1: so many updates have been made
    samples: int  # consumed so far, over all ranks
    loss: float  # mean over the global batch, before the update
    grad_norm: (
        float | None
    )  # of the whole gradient, before clipping; None where fp16 overflowed and the update was left out
    lr: float
    step_s: float  # wall time of this step, data_s included
    data_s: float  # waiting for the batch
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Where the time and memory of some steps went. They were profiled, and slower for it; the last `num_steps` steps up to `step` were."""

    step: int
    num_steps: int
    step_s: float
    seconds: Mapping[
        str, float
    ]  # of step_s by part, the mean over the ranks; in a pipeline over those of the stage that is busiest
    input_s: float  # of rank 0, as in Step
    slowest: int  # rank that is busy longest, for which the others wait
    slowest_s: float  # not waiting for others, in a step
    busy_s: float  # the same, the mean over all ranks
    fullest: int  # rank that holds most
    memory: Mapping[str, int]  # bytes that it holds at its peak by part
    costs_s: float  # that it took from the run


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    step: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    step: int
    path: str  # in the run folder
    bytes: int
    seconds: float  # from the request until it was complete on disk
    blocked_s: float  # of these, how long training stood still


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    what: str  # "save", "worker" (of a parameter server), "rank", "node": the run goes on; "run": a rank ends
    message: str
    step: int  # the last step done
    rank: int | None = None
    lost_peer: bool = False  # this rank failed only because another one was gone
    meant: bool = False  # an error of Paceline's own, whose message says all


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """For a while no rank has gone on."""

    step: int  # the last one done
    ranks: tuple[int, ...]  # that the others wait for
    message: str


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    step: int
    reason: str  # "done" | "stopped"
    communication: float | None = (
        None  # share of the step time spent waiting for other ranks, where the engine tells
    )
    lead: int | None = None  # parameter server: most steps that a worker was seen ahead of the slowest


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Started, Step, Profiled, Evaluated, Saved, Failed, Stalled, Ended)
}

ENCODER = json.JSONEncoder(allow_nan=False)


class UnknownEventError(ValueError):
    """The line is whole, and its event is of a kind that this version does not know."""

    def __init__(self, kind: str):
        super().__init__(f"unknown kind of event: {kind}")
        self.kind = kind


def dumps(event: Event) -> str:
    fields = dict(vars(event))
    if isinstance(event, Evaluated):  # JSON has no NaN, and no infinity
        fields["metrics"] = {
            name: value if math.isfinite(value) else None for name, value in event.metrics.items()
        }
    return ENCODER.encode({"time": fields.pop("time"), "event": type(event).__name__.lower(), **fields})


def loads(line: str | bytes) -> Event:
    """Return the event of a line. Fields that this version does not know are left out.

    Raises ValueError for a damaged line: no JSON object, a field that is missing or has another type; UnknownEventError for another kind.
    """
    try:
        fields = json.loads(line.decode() if isinstance(line, bytes) else line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a line of events must be an object, got {type(fields).__name__}")
    name = fields.get("event")
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,40}", name):
        raise ValueError("the line names no kind of event")
    if name not in KINDS:
        raise UnknownEventError(name)
    found = {}
    for key, (convert, is_required) in _FIELDS[name].items():
        if key in fields:
            found[key] = convert(fields[key])
        elif is_required:
            raise ValueError(f"event {name} lacks {key}")
    return KINDS[name](**found)


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise ValueError(f"expected a number, got {value!r:.40}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("expected a number of at most 1.8e308") from None


def _time(value: Any) -> float:
    found = _number(value)
    if not 0 <= found < LATEST:
        raise ValueError(f"expected seconds since the epoch, got {found}")
    return found


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"expected an integer of at most 64 bits, got {value!r:.40}")
    return value


def _exactly(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, got {value!r:.40}")
        return value

    return convert


def _text(value: Any) -> str:
    """As a terminal may show it: the run may be somebody else's."""
    if type(value) is not str:
        raise ValueError(f"expected str, got {value!r:.40}")
    return without_controls(value)


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a field's type from its JSON; it raises ValueError for another type."""
    if hint in (int, float):
        return _integer if hint is int else _number
    if hint is bool:
        return _exactly(bool)
    if hint is str:
        return _text
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        convert = _converter(next(one for one in inner if one is not NoneType))
        return lambda value: None if value is None else convert(value)
    if origin is Mapping and inner[0] is str:
        convert, of_object = _converter(inner[1]), _exactly(dict)
        return lambda value: {without_controls(key): convert(one) for key, one in of_object(value).items()}
    if origin is tuple and inner[1:] == (...,):
        convert, of_list = _converter(inner[0]), _exactly(list)
        return lambda value: tuple(convert(one) for one in of_list(value))
    raise TypeError(f"a field of an event has type {hint}, which _converter does not know")


def _metric(value: Any) -> float:
    return math.nan if value is None else _number(value)


def _fields(kind: type[Event]) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Return, by name, what reads a field, and whether it must be there."""
    found = {}
    for one in dataclass_fields(kind):
        is_required = one.name == "time" or (one.default is MISSING and one.default_factory is MISSING)
        found[one.name] = (_time if one.name == "time" else _converter(one.type), is_required)
    if kind is Evaluated:
        of_object = _exactly(dict)
        found["metrics"] = (
            lambda value: {without_controls(name): _metric(one) for name, one in of_object(value).items()},
            True,
        )
    return found


_FIELDS = {name: _fields(kind) for name, kind in KINDS.items()}


class EventWriter:
    """Appends events to a file, each in one write. A disk that is full costs events, never the run: `lost` counts them."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.lost = 0
        end = _end_of_lines(
            self._file
        )  # a last line without its newline: its writer was killed, and it would spoil the next
        if end < os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)

    def write(self, event: Event) -> None:
        line = (dumps(event) + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError:
            written = 0
        if written < len(line):
            self.lost += 1
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)

    def close(self) -> None:
        os.close(self._file)


def append(path: Path, event: Event) -> None:
    with contextlib.closing(EventWriter(path)) as writer:
        writer.write(event)


def _end_of_lines(file: int) -> int:
    """Return the position behind the last newline, reading from the end."""
    end, size = os.fstat(file).st_size, min(2**12, BLOCK)  # mostly the last byte is one
    while end:
        begin, size = max(0, end - size), BLOCK
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


@dataclass
class Skipped:
    """Lines that a reader could not use."""

    damaged: int = 0
    unknown: Counter[str] = field(default_factory=Counter)  # by their kind

    def parse(self, line: bytes) -> Event | None:
        """Return the event of a line; count the line where it has none."""
        try:
            return loads(line)
        except UnknownEventError as error:
            self.unknown[
                error.kind if error.kind in self.unknown or len(self.unknown) < KINDS_NAMED else "others"
            ] += 1
        except ValueError:
            self.damaged += 1
        return None

    def __bool__(self) -> bool:
        return bool(self.damaged or self.unknown)

    def __str__(self) -> str:
        """`skipped 1 damaged line and 2 events of unknown kinds (paused) in events.jsonl`; empty where nothing was skipped."""
        damaged = several(self.damaged, "damaged line") if self.damaged else ""
        count = self.unknown.total()
        kinds = ", ".join(sorted(self.unknown))
        unknown = (
            f"{several(count, 'event')} of {'an unknown kind' if count == 1 else 'unknown kinds'} ({kinds})"
            if count
            else ""
        )
        return f"skipped {' and '.join(filter(None, (damaged, unknown)))} in events.jsonl" if self else ""


class EventReader:
    """Reads a file of events piece by piece, each time what has been appended since the last time, in bounded memory.

    A last line that is still being written is left for the next time. Lines that cannot be used are counted in `skipped`. A file that has
    become shorter than what was read was replaced: it is read from its beginning, and `restarts` counts that.
    """

    def __init__(self, path: Path, position: int = 0):
        self.path, self.position = path, position
        self.skipped = Skipped()
        self.restarts = 0
        self._in_long_line = False

    def new(self, *kinds: type[Event]) -> Iterator[Event]:
        """Yield the events since the last time, of these kinds or of all; steps that are not asked for are not parsed."""
        wants_steps = not kinds or Step in kinds
        for block in self._blocks():
            if not wants_steps and _is_all_steps(block):
                continue
            for line in block.split(b"\n")[:-1]:
                if not wants_steps and _is_step(line):
                    continue
                event = self.skipped.parse(line)
                if event is not None and (not kinds or isinstance(event, kinds)):
                    yield event

    def sampled(self) -> Iterator[tuple[Event, int]]:
        """Yield the events since the last time, each with the number of steps that it stands for (0 if it is no step).

        All of them where these are at most PARSED bytes. Of more, as many steps are parsed as that holds, evenly spaced, besides the first
        few of each start, the last one and all other events.
        """
        every = max(1, -(-self._size() // PARSED))
        due = 0  # steps that are parsed whatever stands before
        pending, last = 0, b""  # steps since the last one that was parsed; that line

        def flush() -> Iterator[tuple[Event, int]]:
            nonlocal pending
            event = self.skipped.parse(last) if pending else None
            if event is not None:
                yield event, pending
            pending = 0 if event is not None else max(0, pending - 1)  # the others are left to the next one

        for block in self._blocks():
            if every > 1 and not due and (count := _is_all_steps(block)):
                picks = (pending + count) // every
                begin = 0
                for pick in range(picks):
                    end = block.rfind(b"\n", 0, (pick + 1) * len(block) // picks) + 1
                    if end > begin:
                        pending += block.count(b"\n", begin, end)
                        last = block[block.rfind(b"\n", 0, end - 1) + 1 : end - 1]
                        yield from flush()
                        begin = end
                if begin < len(block):
                    pending += block.count(b"\n", begin)
                    last = block[block.rfind(b"\n", 0, len(block) - 1) + 1 : -1]
                continue
            for line in block.split(b"\n")[:-1]:
                if _is_step(line):
                    pending, last = pending + 1, line
                    if pending >= every or due:
                        due = max(0, due - 1)
                        yield from flush()
                    continue
                event = self.skipped.parse(line)
                if isinstance(event, Step):  # as another program writes it
                    yield from flush()
                    yield event, 1
                elif event is not None:
                    if isinstance(event, Started):
                        yield from flush()
                        pending, due = 0, SINGLE_STEPS
                    yield event, 0
        yield from flush()

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return max(0, self.path.stat().st_size - self.position)
        return 0

    def _blocks(self) -> Iterator[bytes]:
        """Yield whole lines, about BLOCK bytes at a time. A line that is longer than LONGEST is damaged, and never held in memory."""
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position, self._in_long_line, self.skipped = 0, False, Skipped()
                self.restarts += 1
            file.seek(self.position)
            rest = b""
            while piece := file.read(BLOCK):
                if self._in_long_line:
                    newline = piece.find(b"\n")
                    self.position += len(piece) if newline < 0 else newline + 1
                    piece = piece[newline + 1 :] if newline >= 0 else b""
                    self._in_long_line = newline < 0
                end = piece.rfind(b"\n") + 1
                if not end:
                    rest += piece
                    if len(rest) > LONGEST:
                        self.skipped.damaged += 1
                        self.position += len(rest)
                        rest, self._in_long_line = b"", True
                    continue
                block = rest + piece[:end] if rest else piece[:end]
                rest = piece[end:]
                self.position += len(block)
                yield block


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """What is done in the context reads this file, if it is there. Raises RunError where it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"cannot read {path}: it is not a regular file; move it away")
        yield
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def _is_step(line: bytes) -> bool:
    """Whether a line is a step, whole as far as that shows without parsing it."""
    return (
        line.startswith(_HEAD) and _STEP in line and line.endswith(b"}") and line.isascii() and 0 not in line
    )


def _is_all_steps(block: bytes) -> int:
    """Return the number of lines of a block where all are steps, whole as far as that shows without parsing them; else 0."""
    count = block.count(b"\n")
    is_whole = (
        block.count(_STEP) == count
        and block.count(_SEAM) == count - 1
        and block.startswith(_HEAD)
        and block.endswith(b"}\n")
    )
    return count if is_whole and block.isascii() and 0 not in block else 0


def read(path: Path, position: int = 0) -> Iterator[Event]:
    """Yield the events so far, from a position in bytes on, without those that cannot be read."""
    return EventReader(path, position).new()


def last(
    path: Path,
    *kinds: type[Event],
    until: Container[type[Event]] = (),
    begin: int = 0,
    before: int | None = None,
) -> list[Event]:
    """Return the last event of each of these kinds, in the order of the file, which is read from its end.

    until: the search ends at the first that it finds of these kinds, which are some of `kinds`.
    begin, before: only what lies between these positions in bytes, which are those of lines.
    """
    skipped = Skipped()
    wanted = {f'"{kind.__name__.lower()}"'.encode(): kind for kind in kinds}
    found: list[Event] = []
    for _, block in _blocks_back(path, begin, before, skipped):
        if Step not in kinds and _is_all_steps(block):
            continue
        at = len(block)
        while wanted and (at := max(block.rfind(mark, 0, at) for mark in wanted)) >= 0:
            line = block.rfind(b"\n", 0, at) + 1
            event = skipped.parse(block[line : block.find(b"\n", at)])
            if event is not None and type(event) in wanted.values():
                found.append(event)
                wanted = {mark: kind for mark, kind in wanted.items() if kind is not type(event)}
                if type(event) in until:
                    wanted = {}
            at = line
        if not wanted:
            break
    return found[::-1]


def _blocks_back(path: Path, first: int, before: int | None, skipped: Skipped) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines, about BLOCK bytes at a time, from the end of a file, and where they begin. Counts lines longer than LONGEST."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        begin, rest, is_too_long = _end_of_lines(file) if before is None else before, b"", False
        size = min(2**16, BLOCK)
        while begin > first:
            end, begin, size = begin, max(first, begin - size), BLOCK
            piece = os.pread(file, end - begin, begin)
            cut = (
                piece.find(b"\n", 0, len(piece) - (not rest and not is_too_long)) + 1 if begin > first else 0
            )
            if begin > first and not cut:
                rest = piece + rest
                if is_too_long or len(rest) > LONGEST:
                    rest, is_too_long = b"", True
                continue
            block = piece[cut:] + rest
            if is_too_long:
                block, is_too_long = block[: block.rfind(b"\n") + 1], False
                skipped.damaged += 1
            rest = piece[:cut]
            if block:
                yield begin + cut, block
    finally:
        os.close(file)


def tail(path: Path, skipped: Skipped, size: int = 2**16) -> tuple[int, list[Event]]:
    """Return the last events, those of about `size` bytes, and the position where the first of them begins; of steps the last few.

    Lines that cannot be used are counted in `skipped`, and passed over as far as 64 times that size."""
    found: list[Event] = []
    steps = 0
    position = last_line = end(path)
    for at, block in _blocks_back(path, 0, position, skipped):
        position = at + len(block)
        for line in reversed(block.split(b"\n")[:-1]):
            position -= len(line) + 1
            is_step = _is_step(line)
            steps += is_step
            if is_step and steps > LAST_STEPS:
                size -= len(line)
            elif (event := skipped.parse(line)) is not None:
                found.append(event)
                size -= len(line)
            if size <= 0 or last_line - position > 2**22:
                return position, found[::-1]
    return position, found[::-1]


def follow(path: Path, done: Callable[[], bool], position: int = 0, poll_s: float = 0.1) -> Iterator[Event]:
    """Yield events as they come, from a position in bytes on. Ends once `done()` holds and all is read."""
    reader = EventReader(path, position)
    while True:
        is_last = done()
        yield from reader.new()
        if is_last:
            return
        time.sleep(poll_s)


def end(path: Path) -> int:
    """Return the position behind the last whole line."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return _end_of_lines(file)
    finally:
        os.close(file)

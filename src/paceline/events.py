"""Events: what happened in a run, one JSON object per line. Observers of a run read nothing else.

A line has `time` (seconds since the epoch), `event` (started, step, noted, profiled, noisemeasured,
evaluated, saved, failed, stalled or ended) and the fields of that event. Fast steps are written about ten
times a second, several at once, so that other events may precede a step that ended earlier. A run that was
interrupted and resumed repeats the steps after its last checkpoint: the later line counts.
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
from paceline.files import append_whole, end_of_lines
from paceline.units import several, without_controls

BLOCK_BYTES = 2**18  # bytes per read
MAX_LINE_BYTES = 2**20
MAX_PARSED_BYTES = 2**23  # if only a sample of the steps is needed, files up to this size are parsed whole
MAX_TIME = 253e9  # the latest date, in seconds since the epoch
NUM_SINGLE_STEPS = (
    8  # after each start: these steps are slower than others, so they represent only themselves
)
MAX_TAIL_STEPS = 64  # steps that `tail` parses
MAX_KINDS = 5  # unknown kinds that a message names
# How `dumps` begins the line of a step, and the text between two lines: these are found without parsing.
_HEAD, _STEP, _SEAM = b'{"time": ', b'"event": "step", ', b'}\n{"time": '
_OTHER_EVENT = re.compile(rb'"event": "(?!step", )')


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all events of a run. `train` yields them, and `events.jsonl` contains them.

        for event in paceline.train(spec):
            if isinstance(event, paceline.Step):
                print(event.step, event.loss)

    time  seconds since the epoch
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The training starts or resumes; the first event of each start.

        if isinstance(event, Started):
            print(event.plan, event.ranks, event.steps - event.step)

    task        the task, as `Spec.task` names it
    plan        the plan, such as "zero3"
    ranks       number of ranks
    batch       samples of the global batch
    step        steps done before: 0, or the step of the checkpoint from which the run resumed
    steps       the step after which the run is complete
    samples     samples in one epoch
    parameters  number of parameters of the model
    device      "cpu", or the name of the GPU
    precision   data type in which the model computes, such as "bf16"
    threads     CPU threads of torch on each rank
    notes       sentences for the user about how the training is done
    lr_group    the parameter group whose learning rate the steps report, if groups have different rates
    start_s     seconds of each phase of the start, in their order
    facts       numbers of rank 0 for findings: cores (that it may use), local_ranks (on its machine),
                memory_bytes (of the GPU, or the limit of the job), convolutions (of the model),
                channels_last (1 if their weights are in this format, else 0), cudnn_benchmark (likewise),
                capability (10 × compute capability of a CUDA device), native_precision (1 if the device
                computes in `precision`; only for bf16 and fp16)
    """

    task: str
    plan: str
    ranks: int
    batch: int
    step: int
    steps: int
    samples: int
    parameters: int
    device: str
    precision: str
    threads: int
    notes: tuple[str, ...] = ()
    lr_group: str = ""
    start_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One update of the weights.

        losses = [event.loss for event in train(spec) if isinstance(event, Step)]

    step           number of updates made so far, counted from 1
    samples        samples consumed so far, over all ranks
    loss           mean over the global batch, before the update
    grad_norm      norm of the whole gradient before clipping; None if fp16 overflowed (the update is skipped)
    lr             learning rate of the update
    step_s         wall time of this step in seconds, data_s included
    data_s         seconds of waiting for the batch
    samples_per_s  samples of the global batch per second
    losses         means over the global batch of the losses that `Task.loss` returns by name, and of the loss
                   of each update that ran if the task has `updates`; `loss` is then the sum over them
    """

    step: int
    samples: int
    loss: float
    grad_norm: float | None
    lr: float
    step_s: float
    data_s: float
    samples_per_s: float
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """Something that the user should know, which showed during the training.

    step     the last step done
    message  one sentence
    """

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Where the time and memory of some steps went.

    The last `num_steps` steps up to `step` were profiled, and were slower for it.

    step       the last profiled step
    num_steps  number of profiled steps
    step_s     mean wall time of these steps in seconds
    seconds    seconds of step_s by part: the mean over the ranks, or over those of a pipeline's busiest stage
    input_s    seconds that rank 0 waits for the batch in a step, as data_s of Step
    slowest    rank that is busy longest, for which the others wait
    slowest_s  seconds per step in which that rank does not wait for others
    busy_s     the same, as the mean over all ranks
    fullest    rank with the highest peak memory
    memory     bytes of that rank at its peak, by part
    costs_s    seconds that profiling cost the run
    """

    step: int
    num_steps: int
    step_s: float
    seconds: Mapping[str, float]
    input_s: float
    slowest: int
    slowest_s: float
    busy_s: float
    fullest: int
    memory: Mapping[str, int]
    costs_s: float


@dataclass(frozen=True, kw_only=True)
class NoiseMeasured(Event):
    """The gradient noise scale of the last measured steps, up to 50 of them.

    step              the last measured step
    noise_scale       in samples; None if the gradient is lost in its noise
    error             relative standard error of noise_scale; None after one measurement
    variance          trace of the covariance of the gradients of samples, in this step
    squared_gradient  estimate of the squared norm of the true gradient in this step; may be negative
    """

    step: int
    noise_scale: float | None
    error: float | None
    variance: float
    squared_gradient: float


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """An evaluation of the model on the validation split, and on those of `evaluate_splits`.

        if isinstance(event, Evaluated):
            print(event.step, event.metrics["loss"])

    step     the last step done
    metrics  value of each metric by name; NaN or infinity is null in JSON. Names for splits besides
             validation begin with the split: "test/loss"
    seconds  duration of the evaluation
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is complete.

    step       the step of the checkpoint
    path       its path in the run folder
    bytes      its size
    seconds    time from the request until it was complete on disk
    blocked_s  the part of `seconds` in which training stood still
    """

    step: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """Something failed; `what` determines whether the run continues.

    what       "save", "worker" (of a parameter server), "rank", "node": the run continues; "run": a rank ends
    message    one sentence about the cause
    step       the last step done
    rank       the rank that failed, if it is known
    lost_peer  whether this rank failed only because another rank was lost
    meant      whether Paceline raised the error on purpose, so that the message is complete
    error      name of the class of the error, such as "TaskError"; empty if the rank reported no error
    """

    what: str
    message: str
    step: int
    rank: int | None = None
    lost_peer: bool = False
    meant: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """No rank has made progress for a while.

    step     the last step done
    ranks    ranks for which the others wait
    message  one sentence about the cause
    """

    step: int
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The training ended: it is complete, or was stopped. The last event of a run.

    step           the last step done
    reason         "done" (also if a metric ended it before its length) or "stopped" (`resume` continues)
    why            a sentence, if a metric or max_time ended it; else empty
    communication  share of the step time spent waiting for other ranks, if the engine reports it
    lead           parameter server: the most steps by which a worker was ahead of the slowest
    """

    step: int
    reason: str
    why: str = ""
    communication: float | None = None
    lead: int | None = None

    def describe(self) -> str:
        """Return how the training ended, such as `stopped at step 20: max_time=2h is over`."""
        return f"{self.reason} at step {self.step}" + (f": {self.why}" if self.why else "")


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Started, Step, Noted, Profiled, NoiseMeasured, Evaluated, Saved, Failed, Stalled, Ended)
}

ENCODER = json.JSONEncoder(allow_nan=False)


def nan_to_null(value: Any) -> Any:
    """Return a tree of dicts, lists and tuples with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: nan_to_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_metric(name: str) -> str:
    """Return the words for a metric of an evaluation: "validation loss", or with its split "test/loss"."""
    return name if "/" in name else f"validation {name}"


class UnknownEventError(ValueError):
    """The line is valid, but its event is of a kind that this version does not know."""

    def __init__(self, kind: str):
        super().__init__(f"unknown kind of event: {kind}")
        self.kind = kind


def dumps(event: Event) -> str:
    """Return an event as a line of JSON, without the newline."""
    fields = dict(vars(event))
    if isinstance(event, Evaluated):
        fields["metrics"] = nan_to_null(event.metrics)
    if isinstance(event, Step) and not event.losses:
        del fields["losses"]
    return ENCODER.encode({"time": fields.pop("time"), "event": type(event).__name__.lower(), **fields})


def loads(line: str | bytes) -> Event:
    """Return the event of a line. Fields that this version does not know are ignored.

    Raises ValueError for a damaged line: not a JSON object, or a field that is missing or has another type.
    Raises UnknownEventError for another kind of event.
    """
    try:
        fields = json.loads(line.decode() if isinstance(line, bytes) else line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a line of events must be an object, got {type(fields).__name__}")
    name = fields.get("event")
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,40}", name):
        raise ValueError("the line must name a kind of event")
    if name not in KINDS:
        raise UnknownEventError(name)
    values = {}
    for key, (convert, is_required) in _FIELDS[name].items():
        if key in fields:
            values[key] = convert(fields[key])
        elif is_required:
            raise ValueError(f"event {name} lacks {key}")
    return KINDS[name](**values)


def _number(value: Any) -> float:
    """Return a finite number: a duration that is infinite or NaN would spoil every sum."""
    if not math.isfinite(number := _any_number(value)):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _any_number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise ValueError(f"expected a number, got {value!r:.40}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("expected a number of at most 1.8e308") from None


def _time(value: Any) -> float:
    seconds = _number(value)
    if not 0 <= seconds < MAX_TIME:
        raise ValueError(f"expected seconds since the epoch, got {seconds}")
    return seconds


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
    """Return a text without control characters: a terminal may show it, and another user may own the run."""
    if type(value) is not str:
        raise ValueError(f"expected str, got {value!r:.40}")
    return without_controls(value)


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts JSON to the type of a field. It raises ValueError for another type."""
    if hint in (int, float):
        return _integer if hint is int else _number
    if hint is bool:
        return _exactly(bool)
    if hint is str:
        return _text
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        convert = _converter(next(kind for kind in inner if kind is not NoneType))
        return lambda value: None if value is None else convert(value)
    if origin is Mapping and inner[0] is str:
        convert, of_object = _converter(inner[1]), _exactly(dict)
        return lambda value: {without_controls(key): convert(item) for key, item in of_object(value).items()}
    if origin is tuple and inner[1:] == (...,):
        convert, of_list = _converter(inner[0]), _exactly(list)
        return lambda value: tuple(convert(item) for item in of_list(value))
    raise TypeError(f"a field of an event has type {hint}, which _converter does not know")


def _metric(value: Any) -> float:
    return math.nan if value is None else _number(value)


def _fields(kind: type[Event]) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Return the converter of each field, by name, and whether the field is required."""
    converters = {}
    for entry in dataclass_fields(kind):
        is_required = entry.name == "time" or (entry.default is MISSING and entry.default_factory is MISSING)
        converters[entry.name] = (_time if entry.name == "time" else _converter(entry.type), is_required)
    if kind is Step:  # of a training that diverges
        converters["loss"] = (_any_number, True)
    if kind is Evaluated:
        of_object = _exactly(dict)
        converters["metrics"] = (
            lambda value: {without_controls(name): _metric(item) for name, item in of_object(value).items()},
            True,
        )
    return converters


_FIELDS = {name: _fields(kind) for name, kind in KINDS.items()}


class EventWriter:
    """A file to which events are appended, each in one write. Several processes may write at a time.

    A full disk loses events, but does not end the run. `lost` is the number of lost events.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.lost = 0
        # A last line without a newline is from a writer that was killed, and would damage the next line. It
        # is ended and not removed, because another process may append a line after it in the meantime.
        size = os.fstat(self._file).st_size
        is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._before = b"\n" if is_torn else b""

    def write(self, event: Event) -> None:
        """Append an event, or count it in `lost` if the write fails."""
        is_written = append_whole(self._file, self._before + (dumps(event) + "\n").encode())
        self._before = b"" if is_written else self._before
        self.lost += not is_written

    def close(self) -> None:
        os.close(self._file)


def append(path: Path, event: Event) -> None:
    """Append one event to a file."""
    with contextlib.closing(EventWriter(path)) as writer:
        writer.write(event)


@dataclass
class Skipped:
    """Counts of the lines that a reader could not use."""

    damaged: int = 0
    unknown: Counter[str] = field(default_factory=Counter)  # events of unknown kinds, by kind

    def parse(self, line: bytes) -> Event | None:
        """Return the event of a line; count the line and return None if it has no usable event."""
        try:
            return loads(line)
        except UnknownEventError as error:
            self.unknown[
                error.kind if error.kind in self.unknown or len(self.unknown) < MAX_KINDS else "others"
            ] += 1
        except ValueError:
            self.damaged += bool(line)  # see EventWriter: an empty line may end a line that was not torn
        return None

    def __bool__(self) -> bool:
        return bool(self.damaged or self.unknown)

    def __str__(self) -> str:
        """Return `skipped 1 damaged line and 2 events of unknown kinds (paused) in events.jsonl`, or ""."""
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
    """An incremental reader of a file of events, in bounded memory.

    Each call of `new` or `sampled` reads what was appended since the last call.
    An incomplete last line is left for the next call. `skipped` counts unusable lines. A file that has become
    shorter was replaced: it is then read from its beginning, and `restarts` counts these cases.
    """

    def __init__(self, path: Path, position: int = 0):
        self.path, self.position = path, position
        self.skipped = Skipped()
        self.restarts = 0
        self._in_long_line = False

    def new(self, *kinds: type[Event]) -> Iterator[Event]:
        """Yield the events since the last call, of these kinds or of all. Unwanted steps are not parsed."""
        wants_steps = not kinds or Step in kinds
        for block in self.blocks():
            if not wants_steps and is_all_steps(block):
                continue
            for line in block.split(b"\n")[:-1]:
                if not wants_steps and is_step(line):
                    continue
                event = self.skipped.parse(line)
                if event is not None and (not kinds or isinstance(event, kinds)):
                    yield event

    def sampled(self) -> Iterator[tuple[Event, int]]:
        """Yield the events since the last call, each with the number of steps that it represents.

        That number is 0 for an event that is not a step.
        Up to MAX_PARSED_BYTES, every event is parsed. Of a longer file, evenly spaced steps of about that
        size are parsed. The first steps of each start, the last step and all other events are always parsed.
        """
        every = max(1, -(-self._size() // MAX_PARSED_BYTES))
        due = 0  # number of following steps that are parsed in any case
        pending, last = 0, b""  # steps since the last parsed step, and the line of the latest of them

        def flush() -> Iterator[tuple[Event, int]]:
            nonlocal pending
            event = self.skipped.parse(last) if pending else None
            if event is not None:
                yield event, pending
            pending = 0 if event is not None else max(0, pending - 1)  # the next event represents the rest

        for block in self.stretches():
            if every > 1 and not due and (count := is_all_steps(block)):
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
                if is_step(line):
                    pending, last = pending + 1, line
                    if pending >= every or due:
                        due = max(0, due - 1)
                        yield from flush()
                    continue
                event = self.skipped.parse(line)
                if isinstance(event, Step):  # in the format of another program
                    yield from flush()
                    yield event, 1
                elif event is not None:
                    if isinstance(event, Started):
                        yield from flush()
                        pending, due = 0, NUM_SINGLE_STEPS
                    yield event, 0
        yield from flush()

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return max(0, self.path.stat().st_size - self.position)
        return 0

    def has_incomplete_line(self) -> bool:
        """Return whether the file continues after the lines that were read: with a part of a line."""
        return self._size() > 0

    def stretches(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, each either of steps only or, mostly, a line that is not a step."""
        for block in self.blocks():
            yield from split_at_others(block)

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, of about BLOCK_BYTES each; `position` is then the end of the block.

        A line longer than MAX_LINE_BYTES counts as damaged and is never held in memory.
        """
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
            while piece := file.read(BLOCK_BYTES):
                if self._in_long_line:
                    newline = piece.find(b"\n")
                    self.position += len(piece) if newline < 0 else newline + 1
                    piece = piece[newline + 1 :] if newline >= 0 else b""
                    self._in_long_line = newline < 0
                end = piece.rfind(b"\n") + 1
                if not end:
                    rest += piece
                    if len(rest) > MAX_LINE_BYTES:
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
    """Raise RunError if the file exists and the code in the context cannot read it."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"cannot read {path}: it is not a regular file; move it away")
        yield
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def is_step(line: bytes) -> bool:
    """Return whether a line looks like a whole step, without parsing it."""
    return (
        line.startswith(_HEAD) and _STEP in line and line.endswith(b"}") and line.isascii() and 0 not in line
    )


def is_all_steps(block: bytes) -> int:
    """Return the number of lines of a block if all look like whole steps, without parsing them; else 0."""
    count = block.count(b"\n")
    is_whole = (
        block.count(_STEP) == count
        and block.count(_SEAM) == count - 1
        and block.startswith(_HEAD)
        and block.endswith(b"}\n")
    )
    return count if is_whole and block.isascii() and 0 not in block else 0


def split_at_others(block: bytes) -> list[bytes]:
    """Return the parts of a block of whole lines: lines that name other events than steps, and the rest."""
    if is_all_steps(block):
        return [block]
    parts, begin = [], 0
    for match in _OTHER_EVENT.finditer(block):
        if match.start() < begin:  # in the same line
            continue
        line = block.rfind(b"\n", begin, match.start()) + 1 or begin
        parts += [block[begin:line]] if line > begin else []
        begin = block.find(b"\n", match.end()) + 1
        parts.append(block[line:begin])
    return [*parts, block[begin:]] if begin < len(block) else parts


def read(path: Path, position: int = 0) -> Iterator[Event]:
    """Yield the events so far, from a position in bytes. Unusable lines are skipped."""
    return EventReader(path, position).new()


def last(
    path: Path,
    *kinds: type[Event],
    until: Container[type[Event]] = (),
    begin: int = 0,
    before: int | None = None,
) -> list[Event]:
    """Return the last event of each of these kinds, in the order of the file, which is read from its end.

    until: a subset of `kinds`; the search ends at the first event of them that it finds.
    begin, before: positions in bytes at which lines begin; only the lines between them are searched.
    """
    skipped = Skipped()
    wanted = {f'"{kind.__name__.lower()}"'.encode(): kind for kind in kinds}
    events: list[Event] = []
    for _, block in _blocks_back(path, begin, before, skipped):
        if Step not in kinds and is_all_steps(block):
            continue
        position = len(block)
        while wanted and (position := max(block.rfind(mark, 0, position) for mark in wanted)) >= 0:
            line = block.rfind(b"\n", 0, position) + 1
            event = skipped.parse(block[line : block.find(b"\n", position)])
            if event is not None and type(event) in wanted.values():
                events.append(event)
                wanted = {mark: kind for mark, kind in wanted.items() if kind is not type(event)}
                if type(event) in until:
                    wanted = {}
            position = line
        if not wanted:
            break
    return events[::-1]


def _blocks_back(path: Path, first: int, before: int | None, skipped: Skipped) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the lines of blocks of about BLOCK_BYTES, from the end of a file to `first`.

    Lines longer than MAX_LINE_BYTES are counted as damaged.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        begin, rest, is_too_long = end_of_lines(file) if before is None else before, b"", False
        size = min(2**16, BLOCK_BYTES)
        while begin > first:
            end, begin, size = begin, max(first, begin - size), BLOCK_BYTES
            piece = os.pread(file, end - begin, begin)
            cut = (
                piece.find(b"\n", 0, len(piece) - (not rest and not is_too_long)) + 1 if begin > first else 0
            )
            if begin > first and not cut:
                rest = piece + rest
                if is_too_long or len(rest) > MAX_LINE_BYTES:
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
    """Return the last events of about `size` bytes, and the position in bytes of the first of them.

    At most MAX_TAIL_STEPS steps are returned. `skipped` counts unusable lines. At most 4 MiB are read.
    """
    events: list[Event] = []
    steps = 0
    position = last_line = end(path)
    for at, block in _blocks_back(path, 0, position, skipped):
        position = at + len(block)
        for line in reversed(block.split(b"\n")[:-1]):
            position -= len(line) + 1
            is_one_step = is_step(line)
            steps += is_one_step
            if is_one_step and steps > MAX_TAIL_STEPS:
                size -= len(line)
            elif (event := skipped.parse(line)) is not None:
                events.append(event)
                size -= len(line)
            if size <= 0 or last_line - position > 2**22:
                return position, events[::-1]
    return position, events[::-1]


def follow(path: Path, done: Callable[[], bool], position: int = 0, poll_s: float = 0.1) -> Iterator[Event]:
    """Yield events as they are written, from a position in bytes, until `done()` is true and all is read."""
    reader = EventReader(path, position)
    while True:
        is_last = done()
        yield from reader.new()
        if is_last:
            return
        time.sleep(poll_s)


def end(path: Path) -> int:
    """Return the position in bytes after the last whole line."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return end_of_lines(file)
    finally:
        os.close(file)

"""What happened in a run, one JSON object a line: the only channel from a run to those who watch it.

A line has `time` (seconds since the epoch), `event` (started, step, accounted, evaluated, saved, failed, stalled, ended) and the fields of
that event. The figures of quick steps come together, some ten times a second: another line may stand before that of a step
which ended earlier. A run that was interrupted and resumed repeats the steps after its last checkpoint: the later line counts.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


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


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    step: int  # counted from 1: so many updates have been made
    samples: int  # consumed so far, over all ranks
    loss: float  # mean over the global batch, before the update
    grad_norm: float | None  # of the whole gradient, before clipping; None where fp16 overflowed and the update was left out
    lr: float
    step_s: float  # wall time of this step, data_s included
    data_s: float  # waiting for the batch
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Accounted(Event):
    """Where the time and memory of some steps went. They were profiled, and slower for it; the last `profiled` steps up to `step` were."""

    step: int
    profiled: int
    step_s: float
    seconds: Mapping[str, float]  # of step_s by part, the mean over the ranks; in a pipeline over those of the stage that is busiest
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
    communication: float | None = None  # share of the step time spent waiting for other ranks, where the engine tells
    lead: int | None = None  # parameter server: most steps that a worker was seen ahead of the slowest


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Started, Step, Accounted, Evaluated, Saved, Failed, Stalled, Ended)
}

ENCODER = json.JSONEncoder(allow_nan=False)


def dumps(event: Event) -> str:
    fields = dict(vars(event))
    if isinstance(event, Evaluated):  # JSON has no NaN, and no infinity
        fields["metrics"] = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
    return ENCODER.encode({"time": fields.pop("time"), "event": type(event).__name__.lower(), **fields})


def loads(line: str) -> Event:
    fields = json.loads(line)
    if "metrics" in fields:
        fields["metrics"] = {name: math.nan if value is None else value for name, value in fields["metrics"].items()}
    return KINDS[fields.pop("event")](**fields)


class Writer:
    """Appends events to a file, each in one write. A disk that is full costs events, never the run: `lost` counts them."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.lost = 0
        _drop_torn_line(self._file)

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
    with contextlib.closing(Writer(path)) as writer:
        writer.write(event)


def _drop_torn_line(file: int) -> None:
    """Cut off a last line without its newline: its writer was killed, and it would spoil the next."""
    end = size = os.fstat(file).st_size
    while end:
        begin = max(0, end - 2**16)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        end = begin + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(file, end)


def read(path: Path, position: int = 0) -> Iterator[Event]:
    """Events so far, from a position in bytes on; a last line that is still being written is left for the next read."""
    with open(path) as file:
        file.seek(position)
        for line in file:
            if line.endswith("\n"):
                yield loads(line)


def latest(path: Path, lines: int = 200) -> list[Event]:
    """The last start, and the last lines after it: how it is, in little time also where much has happened."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    begin = max((at for at, line in enumerate(whole) if b'"event": "started"' in line), default=0)
    return [loads(line.decode()) for line in [*whole[begin : begin + 1], *whole[begin + 1 :][-lines:]]]


def follow(path: Path, done: Callable[[], bool], position: int = 0, poll_s: float = 0.1) -> Iterator[Event]:
    """Events as they come, from a position in bytes on. Ends once `done()` holds and all is read."""
    while True:
        last = done()
        if path.exists():
            with open(path) as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    yield loads(line)
        if last:
            return
        time.sleep(poll_s)


def end(path: Path) -> int:
    """The position behind the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

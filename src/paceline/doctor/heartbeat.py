"""Heartbeats and stack answers: the files of the run folder in which each rank reports its state."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.events import MAX_TIME
from paceline.files import open_regular
from paceline.monitor.processes import process_birth
from paceline.units import without_controls

START, DATA, FORWARD, BACKWARD, UPDATE, REPORT, EVALUATE, SAVE, ENDED, OWN_CODE = (
    "start",
    "data",
    "forward",
    "backward",
    "update",
    "report",
    "evaluate",
    "save",
    "ended",
    "own code",  # of a training loop that the user writes, between step() and the next forward pass
)
CLOCK_S = 2.0  # tolerated difference between clocks, and delay of a file
MAX_FILE_BYTES = 2**22
MAX_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The content of ranks/N.alive, written about once a second. Times are seconds since the epoch."""

    rank: int
    ranks: int  # world size
    host: str
    pid: int
    began: float  # start of this rank, in seconds since the epoch
    time: float  # when this heartbeat was written, in seconds since the epoch
    step: int  # the last step done
    steps: int | None  # of the whole training; None: not known yet
    stepped: float | None  # when that step ended; None: no step has ended since this start
    longest_s: float  # longest step of this start except the first, without saves and evaluations
    phase: str  # start, data, forward, backward, update, report, evaluate, save, ended or own code
    since: float  # start of this phase; in an evaluation, of this batch
    patience_s: float | None  # how long ranks wait for one another at present; None: they do not wait
    spent_s: Mapping[str, float]  # in each phase, mean of the recent steps
    birth: float | None = None  # of its process, see `process_birth`
    total_steps: int = 0  # of this start, without its first steps
    total_s: Mapping[str, float] = field(default_factory=dict)  # in each phase, sum over these steps
    core_wait_s: float | None = None  # in which its thread waited for a core, sum over these steps


@dataclass(frozen=True)
class Frame:
    """A line of Python in a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The last collective that a rank called in a process group."""

    group: str  # its name, the same on all ranks
    members: Sequence[int]
    number: int  # counted in this group and kind
    kind: str  # "collective" | "message", between two ranks
    operation: str
    items: int  # elements of its inputs
    dtype: str
    called: float
    is_over: bool


@dataclass(frozen=True, kw_only=True)
class StackAnswer:
    """The content of ranks/N.said, written in answer to a request."""

    asked: str  # identifier of the request
    time: float
    stack: Sequence[Frame]  # of the thread that trains, innermost last
    collectives: Sequence[Collective]


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    Heartbeat: TypeAdapter(Heartbeat),
    StackAnswer: TypeAdapter(StackAnswer),
}


def process_age_s(pid: int) -> float | None:
    """Return the seconds since a process started; None if the system does not provide them."""
    began = process_birth(pid) if sys.platform == "linux" else None
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
        if began is not None
        else None
    )


def write(path: Path, value: Heartbeat | StackAnswer) -> None:
    """Write a heartbeat or an answer in place, with one system call.

    One rename per second and rank would overload the file systems of large machines."""
    data = json.dumps(asdict(value)).encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def read(path: Path, build: "type[Heartbeat] | type[StackAnswer]") -> Any:
    """Return the value in a file; None if it is absent, damaged or being written. Ignores unknown fields."""
    try:
        with open_regular(path) as file:
            value = _ADAPTERS[build].validate_python(_strip_controls(json.loads(file.read(MAX_FILE_BYTES))))
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(value, StackAnswer):
        return value
    return _use_file_clock(value, written) if _is_plausible(value) else None


def _is_plausible(beat: Heartbeat) -> bool:
    """Return whether a rank can have written the heartbeat.

    Impossible ranks or process ids would make the reader slow, or fail."""
    times = (
        beat.began,
        beat.time,
        beat.stepped or 0.0,
        beat.longest_s,
        beat.since,
        beat.patience_s or 0.0,
        beat.core_wait_s or 0.0,
        *beat.spent_s.values(),
        *beat.total_s.values(),
    )
    return (
        0 <= beat.rank < beat.ranks <= MAX_RANKS
        and 0 < beat.pid < 2**31
        and all(abs(seconds) < MAX_TIME for seconds in times)
    )


def _strip_controls(tree: Any) -> Any:
    """Return the tree without terminal control characters: another user may have written the run."""
    if isinstance(tree, str):
        return without_controls(tree)
    if isinstance(tree, list):
        return [_strip_controls(item) for item in tree]
    return {key: _strip_controls(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _use_file_clock(beat: Heartbeat, written: float) -> Heartbeat:
    """Return the heartbeat by the clock of the file system if the writer's clock differs.

    All ranks share the clock of the file system."""
    ahead_s = beat.time - written
    return shift_times(beat, -ahead_s) if abs(ahead_s) > CLOCK_S else beat


def clock_offset_s(folder: Path) -> float:
    """Return the seconds that our clock is ahead of the file system's clock; 0 if they are negligible."""
    with contextlib.suppress(OSError):
        os.utime(folder)
        ahead_s = time.time() - folder.stat().st_mtime
        return ahead_s if abs(ahead_s) > CLOCK_S else 0.0
    return 0.0


def shift_times(beat: Heartbeat, by_s: float) -> Heartbeat:
    """Return the heartbeat with `by_s` added to all its times."""
    return replace(
        beat,
        began=beat.began + by_s,
        time=beat.time + by_s,
        since=beat.since + by_s,
        stepped=beat.stepped + by_s if beat.stepped is not None else None,
    )

"""What ranks say of themselves in files of the run folder, written by pulse.py and read by whoever wants to know."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from paceline.events import LATEST
from paceline.files import open_regular
from paceline.units import without_controls

START, DATA, FORWARD, BACKWARD, UPDATE, REPORT, EVALUATE, SAVE, ENDED = (
    "start",
    "data",
    "forward",
    "backward",
    "update",
    "report",
    "evaluate",
    "save",
    "ended",
)
CLOCK_S = 2.0  # that a file may be late
LONGEST = 2**22  # bytes of a file
MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """ranks/N.alive: written about once a second."""

    rank: int
    ranks: int
    host: str
    pid: int
    began: float  # seconds since the epoch, as all times here
    time: float
    step: int  # the last step done
    steps: int | None  # of the whole training; None: not known yet
    stepped: float | None  # when that step ended; None: none has since this start
    longest_s: float  # step of this start, but for the first; saves and evaluations are none of it
    phase: str
    since: float  # in this phase; in an evaluation, at this batch
    patience_s: float | None  # that the ranks wait for one another now; None: they do not
    spent_s: Mapping[str, float]  # in each phase, a step of late
    birth: float | None = None  # of its process, see `birth`


@dataclass(frozen=True)
class Frame:
    """A line of Python that is being executed."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The last one that a rank has called in a group of ranks."""

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
    """ranks/N.said: written when asked."""

    asked: str
    time: float
    stack: Sequence[Frame]  # of the thread that trains, innermost last
    collectives: Sequence[Collective]


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    Heartbeat: TypeAdapter(Heartbeat),
    StackAnswer: TypeAdapter(StackAnswer),
}


def birth(pid: int) -> float | None:
    """Return what tells a process from others that had or will have its id; None where there is none with this id.

    On Linux the clock ticks from the start of the machine to its own. (psutil's create_time adds the time of that start in whole seconds,
    and moves whenever the clock is set.)"""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def age_s(pid: int) -> float | None:
    """Return the seconds since a process was started; None where the system does not tell."""
    began = birth(pid) if sys.platform == "linux" else None
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
        if began is not None
        else None
    )


def write(path: Path, value: Heartbeat | StackAnswer) -> None:
    """In place, in one write: a rename a second and rank is more than file systems of large machines like."""
    data = json.dumps(asdict(value)).encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def read(path: Path, build: "type[Heartbeat] | type[StackAnswer]") -> Any:
    """None where it is not there, is damaged, or was caught while it is being written. Unknown fields are left out."""
    try:
        with open_regular(path) as file:
            found = _ADAPTERS[build].validate_python(_shown(json.loads(file.read(LONGEST))))
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(found, StackAnswer):
        return found
    return _by_clock_of_files(found, written) if _is_possible(found) else None


def _is_possible(one: Heartbeat) -> bool:
    """Whether a rank could have written it: what follows would take long, or fail, with ranks and processes that cannot be."""
    times = (
        one.began,
        one.time,
        one.stepped or 0.0,
        one.longest_s,
        one.since,
        one.patience_s or 0.0,
        *one.spent_s.values(),
    )
    return (
        0 <= one.rank < one.ranks <= MOST_RANKS
        and 0 < one.pid < 2**31
        and all(abs(seconds) < LATEST for seconds in times)
    )


def _shown(tree: Any) -> Any:
    """Its texts as a terminal may show them: the run may be somebody else's."""
    if isinstance(tree, str):
        return without_controls(tree)
    if isinstance(tree, list):
        return [_shown(one) for one in tree]
    return {key: _shown(one) for key, one in tree.items()} if isinstance(tree, dict) else tree


def _by_clock_of_files(one: Heartbeat, written: float) -> Heartbeat:
    """That is the same for all ranks, where the writer's own is another one."""
    ahead_s = one.time - written
    return moved(one, -ahead_s) if abs(ahead_s) > CLOCK_S else one


def ahead_s(folder: Path) -> float:
    """Of the clock of the file system, which dates what ranks write, seconds that ours is ahead; 0 where that is not worth a word."""
    with contextlib.suppress(OSError):
        os.utime(folder)
        found = time.time() - folder.stat().st_mtime
        return found if abs(found) > CLOCK_S else 0.0
    return 0.0


def moved(one: Heartbeat, by_s: float) -> Heartbeat:
    """All its times."""
    stepped = one.stepped + by_s if one.stepped is not None else None
    return replace(one, began=one.began + by_s, time=one.time + by_s, since=one.since + by_s, stepped=stepped)

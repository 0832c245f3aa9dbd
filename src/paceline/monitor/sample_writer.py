"""Append sections and rows to a sample file."""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.errors import RunError
from paceline.files import append_whole, end_of_lines, reason
from paceline.monitor.columns import unit_of
from paceline.monitor.sections import FIRST_LINE
from paceline.units import without_controls

CONTINUES = "sampling continues, but "  # begins a sentence of a sampler that continues
LOCK_S = 3.0  # how long to wait until the sampler of an earlier start has ended
MAX_FILES = 64  # of nodes with the same name
MAX_NAME = 100
DECIMALS = {"s": 3, "%": 1, "MB/s": 3, "MiB": 1, "W": 1, "J": 2}
COARSE = re.compile(r"cpu\d+")  # percents of cores are whole numbers: there may be hundreds


def file_name_of(node: str) -> str:
    """Return the name of the file of a node, without characters that could lead out of the folder."""
    return (re.sub(r"[^A-Za-z0-9._-]", "-", node).lstrip(".-") or "node")[:MAX_NAME]


def format_value(value: float | None, decimals: int) -> str:
    """Return a value as text, empty if it is missing."""
    if value is None or value != value or abs(value) >= 1e18:
        return ""
    return f"{value:.{decimals}f}" if value else "0"


def decimals_of(name: str) -> int:
    """Return the number of decimals of a column in a file."""
    if name == "load":
        return 2
    return 0 if COARSE.fullmatch(name) else DECIMALS.get(unit_of(name), 0)


class SampleWriter:
    """A sample file that this process alone appends to. `lost` is the number of rows that were not written.

    Each row is one write of a whole line, so that the file is complete whenever this process is killed. A
    full disk loses rows.
    """

    def __init__(self, file: int, path: Path):
        self._file, self.path = file, path
        self._decimals: list[int] = []
        self._head = ""  # what must be written before the next row
        self.lost = 0
        # A last line without a newline is from a sampler that was killed; it would damage the next line.
        end = end_of_lines(file)
        if end < os.fstat(file).st_size:
            os.ftruncate(file, end)

    def begin(self, node: str, comments: Iterable[tuple[str, str]]) -> None:
        """Start a section, with comments by topic."""
        self._head = f"{FIRST_LINE}\n"
        self.comment([("node", node), *comments])

    def comment(self, comments: Iterable[tuple[str, str]]) -> None:
        """Add comments before the next row."""
        for topic, text in comments:
            self._head += without_controls(f"# {topic}: {text}").replace("\n", " ").replace("\t", " ") + "\n"

    def set_columns(self, names: Sequence[str]) -> None:
        """Set the columns of the rows that follow."""
        self._decimals = [decimals_of(name) for name in names]
        header = ["time [s]", *(f"{name} [{unit}]" if (unit := unit_of(name)) else name for name in names)]
        self._head += ",".join(header) + "\n"

    def write(self, at: float, values: Sequence[float | None]) -> bool:
        """Append a row, and return whether it was written. at: seconds since the epoch"""
        row = map(format_value, values, self._decimals)
        data = f"{self._head}{at:.3f},{','.join(row)}\n".encode()
        if not append_whole(self._file, data):
            self.lost += 1
            return False
        self._head = ""
        return True

    def clock_ahead_s(self) -> float:
        """Return the seconds by which the clock of this node is ahead of that of the file system."""
        with contextlib.suppress(OSError):
            os.utime(self._file)
            return time.time() - os.fstat(self._file).st_mtime
        return 0.0

    def close(self) -> None:
        os.close(self._file)


def open_sample_file(folder: Path, node: str, lock_s: float = LOCK_S) -> SampleWriter:
    """Return a writer for the file of a node in a folder, which is created. Raises RunError.

    If another process still writes it after `lock_s` seconds, another node has the same name: the file then
    gets a number.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {reason(error)}") from error
    stem = file_name_of(node)
    deadline = time.monotonic() + lock_s
    for number in range(1, MAX_FILES + 1):
        path = folder / (f"{stem}.csv" if number == 1 else f"{stem}-{number}.csv")
        file = open_to_append(path)
        while not (is_locked := _lock(file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_locked:
            return SampleWriter(file, path)
        os.close(file)
    raise RunError(f"cannot write {folder}/{stem}.csv: {MAX_FILES} files of that name are in use")


def lock_to_append(path: Path, first_line: str) -> int:
    """Return a descriptor of a file that this process alone may append to.

    first_line: how a file of this format begins
    Raises RunError if the file begins differently, or if another process writes it.
    """
    file = open_to_append(path)
    try:
        begin = os.pread(file, len(first_line.encode()), 0)
        if begin and begin != first_line.encode():
            raise RunError(
                f"cannot append to {path}: it begins with {begin[:30].decode(errors='replace')!r} instead of"
                f" {first_line[:30]!r}; specify another file, or delete it"
            )
        if not _lock(file):
            raise RunError(f"cannot write {path}: another process appends to it; specify another file")
    except RunError:
        os.close(file)
        raise
    return file


def open_to_append(path: Path) -> int:
    """Return a descriptor of a regular file, which is created. Raises RunError for links and devices."""
    try:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise RunError(f"cannot write {path}: it is not a regular file; move it away")
    return file


def _lock(file: int) -> bool:
    """Lock a file until this process ends. Return whether that worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system has no locks
    return True


def describe_lost_rows(path: Path) -> str:
    """Return a sentence about rows that cannot be written."""
    with contextlib.suppress(OSError):
        stats = os.statvfs(path.parent)
        if stats.f_bavail == 0:
            return f"cannot write {path}: no space left on the device"
    return f"cannot write {path}: the file system refuses it"

"""How fast directories are: large and small writes that are on the disk, reads, small files, a checkpoint; bounded in time and room."""

import contextlib
import errno
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from paceline.bench.result import Row
from paceline.bench.storage import io_ops
from paceline.bench.storage.io_ops import Samples, StorageRoom
from paceline.bench.timer import timing
from paceline.cluster import directories
from paceline.errors import BenchError
from paceline.units import format_bytes

KEYS = ("directory", "test")
MOST_BYTES = 4 * 2**30  # written at once in one directory
MOST_FILES = 20_000
LEAST_BYTES, LEAST_FILES = 2**20, 30
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class StorageTest:
    name: str
    run: Callable[[StorageRoom], Samples]
    share: float  # of the time there is
    rate: str  # what is counted: "Bps" or "per_s"


TESTS = (
    StorageTest("large write", io_ops.write_dsync, 0.25, "Bps"),
    StorageTest("direct write", io_ops.write_direct, 0.1, "Bps"),
    StorageTest("read", io_ops.read_cold, 0.1, "Bps"),
    StorageTest("direct read", io_ops.read_direct, 0.1, "Bps"),
    StorageTest("random read", io_ops.read_random, 0.05, "per_s"),
    StorageTest("small write", io_ops.write_small, 0.1, "per_s"),
    StorageTest("create", io_ops.create, 0.05, "per_s"),
    StorageTest("open", io_ops.open_and_read, 0.05, "per_s"),
    StorageTest("stat", io_ops.stat, 0.025, "per_s"),
    StorageTest("delete", io_ops.delete, 0.025, "per_s"),
    StorageTest("checkpoint", io_ops.write_together, 0.15, "Bps"),
)


def check(asked: Sequence[Path]) -> list[Path]:
    """The directories, each once. Raises BenchError for one that cannot be measured, before anything is."""
    found = list(dict.fromkeys(path.expanduser().resolve() for path in asked))
    for path in found:
        if not path.exists():
            raise BenchError(f"there is no directory {path}; name one that exists")
        if not path.is_dir():
            raise BenchError(f"{path} is a file; name the directory to measure")
        try:
            Path(tempfile.mkdtemp(prefix=PREFIX, dir=path)).rmdir()
        except OSError as error:
            raise BenchError(f"cannot write in {path}: {error.strerror}; name another directory") from error
        facts = space(path)
        if facts["free_bytes"] < LEAST_BYTES or facts["free_files"] in range(LEAST_FILES):
            many = f" and {facts['free_files']:,} files" if facts["free_files"] is not None else ""
            raise BenchError(
                f"{path} is full: there is room for {format_bytes(facts['free_bytes'])}{many}, and at least "
                f"{format_bytes(LEAST_BYTES)} and {LEAST_FILES} files are needed; make room, or name another directory"
            )
    return found


PREFIX = ".paceline-bench-"


def measure(directory: Path, budget_s: float, writers: int) -> Iterator[Row]:
    """A row for each test of `directory`, which has passed `check`. What a test came to before it was interrupted, or the directory
    full, is a row as well. Nothing is left behind."""
    facts = space(directory)
    free_files = facts["free_files"] // 2 if facts["free_files"] is not None else MOST_FILES
    with _folder_in(directory) as folder:
        room = StorageRoom(folder, _most_bytes(facts), min(MOST_FILES, free_files), writers)
        try:
            io_ops.choose_block(room, budget_s * TESTS[0].share)
        except OSError as error:
            yield facts | {"test": TESTS[0].name, "bytes": 0, "seconds": 0.0, "note": error.strerror}
            return
        for test in TESTS:
            for row in _measured(test, room, budget_s * test.share):
                yield facts | row


def space(directory: Path) -> dict[str, Any]:
    """What limits a directory: the room on its file system, and what a quota leaves. None where nobody counts."""
    found = directories.look(directory, (), directories.quotas(), directories.mounts())
    quota = found.quota
    left_bytes = quota.limit_bytes - quota.used_bytes if quota and quota.limit_bytes is not None else None
    left_files = (
        quota.limit_files - quota.used_files
        if quota and quota.limit_files is not None and quota.used_files is not None
        else None
    )
    return {
        "directory": str(directory),
        "filesystem": found.filesystem,
        "free_bytes": _least(found.free_bytes, left_bytes),
        "free_files": _least(found.free_files, left_files),
        "quota": quota is not None and (left_bytes is not None or left_files is not None),
    }


def _least(*counts: int | None) -> int | None:
    return max(0, min(known)) if (known := [count for count in counts if count is not None]) else None


def _most_bytes(facts: dict[str, Any]) -> int:
    most: int = min(MOST_BYTES, facts["free_bytes"] // 2)
    return min(most, psutil.virtual_memory().available // 4) if facts["filesystem"] in IN_MEMORY else most


def _measured(test: StorageTest, room: StorageRoom, budget_s: float) -> Iterator[dict[str, Any]]:
    samples: list[tuple[float, int]] = []
    note = None
    deadline = time.perf_counter() + budget_s
    try:
        with contextlib.closing(test.run(room)) as source:
            for sample in source:
                samples.append(sample)
                if time.perf_counter() > deadline:
                    break
    except OSError as error:
        note = error.strerror if error.errno != errno.EINVAL else "no direct I/O here"
    except KeyboardInterrupt:
        if samples:
            yield _row(test, samples, "interrupted")
        raise
    if test.run is io_ops.read_cold and room.cached_share > 0.01:
        note = f"{room.cached_share:.0%} of it from the page cache, which could not be dropped"
    if samples or note:
        yield _row(test, samples, note)


def _row(test: StorageTest, samples: Sequence[tuple[float, int]], note: str | None) -> dict[str, Any]:
    size, seconds = sum(size for _, size in samples), sum(seconds for seconds, _ in samples)
    row: dict[str, Any] = {"test": test.name, "bytes": size, "seconds": seconds}
    if samples:
        row |= {
            "block_bytes": samples[0][1],
            test.rate: (size if test.rate == "Bps" else len(samples)) / seconds,
        }
        row |= timing([0.0, *accumulate(seconds for seconds, _ in samples)]).fields()
    return row | ({"note": note} if note else {})


@contextlib.contextmanager
def _folder_in(directory: Path) -> Iterator[Path]:
    """A folder for the time of this context, which a SIGTERM or SIGHUP ends as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)

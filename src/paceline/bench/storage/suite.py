"""Tests of a directory, bounded in time and space: synchronous writes, reads, small files, a checkpoint."""

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
from paceline.bench.timer import summarize_times
from paceline.cluster import directories
from paceline.errors import BenchError
from paceline.units import format_bytes

KEYS = ("directory", "test")
MAX_BYTES = 4 * 2**30  # stored at the same time in one directory
MAX_FILES = 20_000
MIN_BYTES, MIN_FILES = 2**20, 30
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class StorageTest:
    """A test of a directory."""

    name: str
    run: Callable[[StorageRoom], Samples]
    share: float  # of the time budget
    rate: str  # unit of the rate: "Bps" or "per_s"


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


def check_directories(paths: Sequence[Path]) -> list[Path]:
    """Return the directories without duplicates. Raises BenchError if a directory cannot be measured."""
    resolved = list(dict.fromkeys(path.expanduser().resolve() for path in paths))
    for path in resolved:
        if not path.exists():
            raise BenchError(f"no such directory: {path}; specify an existing directory")
        if not path.is_dir():
            raise BenchError(f"{path} is a file; specify a directory")
        try:
            Path(tempfile.mkdtemp(prefix=PREFIX, dir=path)).rmdir()
        except OSError as error:
            raise BenchError(
                f"cannot write in {path}: {error.strerror}; specify another directory"
            ) from error
        facts = read_free_space(path)
        if facts["free_bytes"] < MIN_BYTES or facts["free_files"] in range(MIN_FILES):
            files = f" and {facts['free_files']:,} files" if facts["free_files"] is not None else ""
            raise BenchError(
                f"{path} is full: {format_bytes(facts['free_bytes'])}{files} are free, but at least "
                f"{format_bytes(MIN_BYTES)} and {MIN_FILES} files are required; "
                "free some space, or specify another directory"
            )
    return resolved


PREFIX = ".paceline-bench-"


def measure(directory: Path, budget_s: float, writers: int) -> Iterator[Row]:
    """Yield a row for each test of a directory that has passed `check_directories`.

    A test that is interrupted, or that fills the directory, yields a row of its samples until then. All files
    are deleted at the end.
    """
    facts = read_free_space(directory)
    free_files = facts["free_files"] // 2 if facts["free_files"] is not None else MAX_FILES
    with _temporary_folder(directory) as folder:
        room = StorageRoom(folder, _usable_bytes(facts), min(MAX_FILES, free_files), writers)
        try:
            io_ops.choose_block(room, budget_s * TESTS[0].share)
        except OSError as error:
            yield facts | {"test": TESTS[0].name, "bytes": 0, "seconds": 0.0, "note": error.strerror}
            return
        for test in TESTS:
            for row in _run_test(test, room, budget_s * test.share):
                yield facts | row


def read_free_space(directory: Path) -> dict[str, Any]:
    """Return the free bytes and files of a directory, as file system and quota limit them; None: no limit."""
    info = directories.examine(directory, (), directories.read_quotas(), directories.list_mounts())
    quota = info.quota
    left_bytes = quota.limit_bytes - quota.used_bytes if quota and quota.limit_bytes is not None else None
    left_files = (
        quota.limit_files - quota.used_files
        if quota and quota.limit_files is not None and quota.used_files is not None
        else None
    )
    return {
        "directory": str(directory),
        "filesystem": info.filesystem,
        "free_bytes": _minimum(info.free_bytes, left_bytes),
        "free_files": _minimum(info.free_files, left_files),
        "quota": quota is not None and (left_bytes is not None or left_files is not None),
    }


def _minimum(*counts: int | None) -> int | None:
    """Return the smallest known count, at least 0; None if no count is known."""
    return max(0, min(known)) if (known := [count for count in counts if count is not None]) else None


def _usable_bytes(facts: dict[str, Any]) -> int:
    limit: int = min(MAX_BYTES, facts["free_bytes"] // 2)
    return min(limit, psutil.virtual_memory().available // 4) if facts["filesystem"] in IN_MEMORY else limit


def _run_test(test: StorageTest, room: StorageRoom, budget_s: float) -> Iterator[dict[str, Any]]:
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
        note = error.strerror if error.errno != errno.EINVAL else "no direct I/O in this directory"
    except KeyboardInterrupt:
        if samples:
            yield _build_row(test, samples, "interrupted")
        raise
    if test.run is io_ops.read_cold and room.cached_share > 0.01:
        note = f"{room.cached_share:.0%} read from the page cache, which could not be dropped"
    if samples or note:
        yield _build_row(test, samples, note)


def _build_row(test: StorageTest, samples: Sequence[tuple[float, int]], note: str | None) -> dict[str, Any]:
    size, seconds = sum(size for _, size in samples), sum(seconds for seconds, _ in samples)
    row: dict[str, Any] = {"test": test.name, "bytes": size, "seconds": seconds}
    if samples:
        row |= {
            "block_bytes": samples[0][1],
            test.rate: (size if test.rate == "Bps" else len(samples)) / seconds,
        }
        row |= summarize_times([0.0, *accumulate(seconds for seconds, _ in samples)]).fields()
    return row | ({"note": note} if note else {})


@contextlib.contextmanager
def _temporary_folder(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder. In this context, SIGTERM and SIGHUP act like Ctrl-C."""

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

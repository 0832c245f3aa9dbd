"""File operations that measure a directory.

Each yields (seconds, bytes) per repetition, so that an early end loses nothing.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

MiB = 2**20
SMALL = 512  # bytes of a small write, as in `dd bs=512`
PAGE = 4096  # bytes of a random read, and of a small file
CHUNK = 16 * MiB  # bytes per system call, if a block is larger
TRIAL = 4 * MiB  # bytes written to estimate the speed
BLOCKS = tuple(2**power for power in range(30, 11, -1))  # 1 GiB to 4 KiB

Samples = Generator[tuple[float, int]]


@dataclass
class StorageRoom:
    """A folder to measure in, and how much of it may be filled."""

    folder: Path
    free_bytes: int  # half of it for the large file, half for other files
    free_files: int
    writers: int
    block_bytes: int = PAGE  # of large writes
    cached_share: float = (
        0.0  # share of the large file that could not be dropped from the page cache before reading
    )

    @property
    def large(self) -> Path:
        return self.folder / "large"

    @property
    def large_bytes(self) -> int:
        return self.large.stat().st_size if self.large.exists() else 0


def choose_block(room: StorageRoom, budget_s: float) -> None:
    """Set the block size: 1 GiB, or less if space or a quarter of the budget does not suffice for a block."""
    size = max(PAGE, min(TRIAL, room.free_bytes // 2))
    path = room.folder / "trial"
    start = time.perf_counter()
    with _open(path, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        _write(file, _noise(size), size)
    path.unlink()
    # A quarter of the budget, so that the test writes several blocks.
    affordable = size / (time.perf_counter() - start) * budget_s / 4
    room.block_bytes = next(
        block for block in BLOCKS if block <= max(PAGE, min(room.free_bytes / 2, affordable))
    )


def write_dsync(room: StorageRoom) -> Samples:
    """Write like `dd bs=1G oflag=dsync`: each block is on the disk before the next is written."""
    with _open(room.large, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        yield from _blocks(file, room.block_bytes, room.free_bytes // 2)


def write_direct(room: StorageRoom) -> Samples:
    """Write past the page cache, each block on the disk before the next."""
    path = room.folder / "direct"
    with _open(path, os.O_WRONLY | os.O_CREAT | DSYNC | _direct()) as file:
        yield from _blocks(file, min(CHUNK, room.block_bytes), room.free_bytes // 2)
    path.unlink()


def _blocks(file: int, block: int, free_bytes: int) -> Samples:
    """Write blocks until half of the space is used. A short block means that the space ran out."""
    noise = _noise(min(CHUNK, block))
    for _ in range(free_bytes // block):
        start = time.perf_counter()
        written = _write(file, noise, block)
        yield time.perf_counter() - start, written


def read_cold(room: StorageRoom) -> Samples:
    """Read in order, after dropping the page cache."""
    with _open(room.large, os.O_RDONLY) as file:
        drop_cache(file)
        room.cached_share = cached_share(room.large)
        yield from _reads(file, room.large_bytes, min(MiB, room.block_bytes))


def read_direct(room: StorageRoom) -> Samples:
    """Read in order, past the page cache."""
    with _open(room.large, os.O_RDONLY | _direct()) as file:
        yield from _reads(file, room.large_bytes, min(CHUNK, room.block_bytes))


def _reads(file: int, size: int, block: int) -> Samples:
    with mmap.mmap(-1, block) as buffer:
        for _ in range(size // block):
            start = time.perf_counter()
            read = os.readv(file, [buffer])
            yield time.perf_counter() - start, read


def read_random(room: StorageRoom) -> Samples:
    """Read 4 KiB at random positions, past the page cache, one read after another."""
    pages = room.large_bytes // PAGE
    generator = random.Random(0)
    with _open(room.large, os.O_RDONLY | _direct()) as file, mmap.mmap(-1, PAGE) as buffer:
        while pages:
            offset = generator.randrange(pages) * PAGE
            start = time.perf_counter()
            size = os.preadv(file, [buffer], offset)
            yield time.perf_counter() - start, size


def write_small(room: StorageRoom) -> Samples:
    """Write like `dd bs=512 count=50000 oflag=dsync`."""
    path = room.folder / "small"
    data = os.urandom(SMALL)
    with _open(path, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        for _ in range(min(50_000, room.free_bytes // SMALL)):
            start = time.perf_counter()
            size = os.write(file, data)
            yield time.perf_counter() - start, size
    path.unlink()


def create(room: StorageRoom) -> Samples:
    """Create files of 4 KiB in one folder, without waiting for the disk."""
    (room.folder / "many").mkdir()
    data = os.urandom(PAGE)
    for number in range(min(room.free_files, room.free_bytes // 2 // PAGE)):
        start = time.perf_counter()
        with _open(room.folder / "many" / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            size = os.write(file, data)
        yield time.perf_counter() - start, size


def open_and_read(room: StorageRoom) -> Samples:
    for path in _files(room):
        start = time.perf_counter()
        with _open(path, os.O_RDONLY) as file:
            size = len(os.read(file, PAGE))
        yield time.perf_counter() - start, size


def stat(room: StorageRoom) -> Samples:
    for path in _files(room):
        start = time.perf_counter()
        os.stat(path)
        yield time.perf_counter() - start, 0


def delete(room: StorageRoom) -> Samples:
    for path in _files(room):
        start = time.perf_counter()
        os.unlink(path)
        yield time.perf_counter() - start, 0


def _files(room: StorageRoom) -> list[str]:
    folder = room.folder / "many"
    return [entry.path for entry in os.scandir(folder)] if folder.exists() else []


def write_together(room: StorageRoom) -> Samples:
    """Write one file per writer, all at once, and wait for the disk at the end: as a checkpoint is written.

    The writers are threads, which the kernel treats like processes.
    """
    share = max(PAGE, min(room.free_bytes // 2, room.block_bytes) // room.writers)
    noise = _noise(min(CHUNK, share))
    while True:
        written = [0] * room.writers
        errors: list[OSError] = []
        start = time.perf_counter()
        _write_files(room, share, noise, written, errors)
        seconds = time.perf_counter() - start
        for path in room.folder.glob("rank*"):
            path.unlink()
        yield seconds, sum(written)
        if errors:
            raise errors[0]


def _write_files(
    room: StorageRoom, share: int, noise: mmap.mmap, written: list[int], errors: list[OSError]
) -> None:
    """Write one file per writer. `written` receives the bytes of each writer.

    An interrupt waits for all writers, so that no writer creates a file in a folder that is being deleted.
    """
    stopped = threading.Event()

    def write(writer: int) -> None:
        try:
            with _open(room.folder / f"rank{writer}", os.O_WRONLY | os.O_CREAT) as file:
                while written[writer] < share and not stopped.is_set():
                    written[writer] += _write(file, noise, min(CHUNK, share - written[writer]))
                os.fsync(file)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(room.writers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


DSYNC = os.O_DSYNC


def _direct() -> int:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, "this system has no direct I/O")
    return os.O_DIRECT


@contextlib.contextmanager
def _open(path: Path | str, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _noise(size: int) -> mmap.mmap:
    """Return incompressible bytes, aligned to a page as direct I/O requires."""
    noise = mmap.mmap(-1, size)
    noise.write(os.urandom(size))
    return noise


def _write(file: int, noise: mmap.mmap, size: int) -> int:
    """Write `size` bytes in one system call, which may write fewer; return the bytes written."""
    whole, rest = divmod(size, len(noise))
    return os.writev(file, [noise] * whole + [memoryview(noise)[:rest]] * bool(rest))


def drop_cache(file: int) -> None:
    """Ask the kernel to drop a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags
        )
        del start
    return 1.0 if failed else sum(flag & 1 for flag in flags) / len(flags)

"""What is done with files to measure a directory: each operation yields (seconds, bytes), so that nothing is lost when it ends early."""

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
SMALL = 512  # bytes of a small write, as `dd bs=512` has them
PAGE = 4096  # bytes of a random read, and of a small file
CHUNK = 16 * MiB  # bytes handed over at once, where not a whole block is
TRIED = 4 * MiB  # bytes written to see how quick it is
BLOCKS = tuple(2**power for power in range(30, 11, -1))  # 1 GiB to 4 KiB

Samples = Generator[tuple[float, int]]


@dataclass
class StorageRoom:
    """A folder to measure in, and how much of it may be filled."""

    folder: Path
    free_bytes: int  # half of it for the one file that stays, half for others
    free_files: int
    writers: int
    block_bytes: int = PAGE  # of large writes
    cached_share: float = (
        0.0  # of the large file, when it was read: what could not be dropped from the page cache
    )

    @property
    def large(self) -> Path:
        return self.folder / "large"

    @property
    def large_bytes(self) -> int:
        return self.large.stat().st_size if self.large.exists() else 0


def choose_block(room: StorageRoom, budget_s: float) -> None:
    """1 GiB, or as much as there is room for, or as can be written in a quarter of the time there is."""
    size = max(PAGE, min(TRIED, room.free_bytes // 2))
    path = room.folder / "tried"
    began = time.perf_counter()
    with _opened(path, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        _write(file, _noise(size), size)
    path.unlink()
    in_time = size / (time.perf_counter() - began) * budget_s / 4  # so that there are some
    room.block_bytes = next(
        block for block in BLOCKS if block <= max(PAGE, min(room.free_bytes / 2, in_time))
    )


def write_dsync(room: StorageRoom) -> Samples:
    """As `dd bs=1G oflag=dsync`: each block is on the disk before the next is written."""
    with _opened(room.large, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        yield from _blocks(file, room.block_bytes, room.free_bytes // 2)


def write_direct(room: StorageRoom) -> Samples:
    """Past the page cache, and on the disk before the next."""
    path = room.folder / "direct"
    with _opened(path, os.O_WRONLY | os.O_CREAT | DSYNC | _direct()) as file:
        yield from _blocks(file, min(CHUNK, room.block_bytes), room.free_bytes // 2)
    path.unlink()


def _blocks(file: int, block: int, free_bytes: int) -> Samples:
    """A block that is short is what there was room for."""
    noise = _noise(min(CHUNK, block))
    for _ in range(free_bytes // block):
        began = time.perf_counter()
        written = _write(file, noise, block)
        yield time.perf_counter() - began, written


def read_cold(room: StorageRoom) -> Samples:
    """In order, with the page cache dropped before."""
    with _opened(room.large, os.O_RDONLY) as file:
        drop_cache(file)
        room.cached_share = cached_share(room.large)
        yield from _reads(file, room.large_bytes, min(MiB, room.block_bytes))


def read_direct(room: StorageRoom) -> Samples:
    """In order, past the page cache."""
    with _opened(room.large, os.O_RDONLY | _direct()) as file:
        yield from _reads(file, room.large_bytes, min(CHUNK, room.block_bytes))


def _reads(file: int, size: int, block: int) -> Samples:
    with mmap.mmap(-1, block) as buffer:
        for _ in range(size // block):
            began = time.perf_counter()
            read = os.readv(file, [buffer])
            yield time.perf_counter() - began, read


def read_random(room: StorageRoom) -> Samples:
    """4 KiB at a time, past the page cache, one after another."""
    pages = room.large_bytes // PAGE
    draw = random.Random(0)
    with _opened(room.large, os.O_RDONLY | _direct()) as file, mmap.mmap(-1, PAGE) as buffer:
        while pages:
            place = draw.randrange(pages) * PAGE
            began = time.perf_counter()
            size = os.preadv(file, [buffer], place)
            yield time.perf_counter() - began, size


def write_small(room: StorageRoom) -> Samples:
    """As `dd bs=512 count=50000 oflag=dsync`."""
    path = room.folder / "small"
    data = os.urandom(SMALL)
    with _opened(path, os.O_WRONLY | os.O_CREAT | DSYNC) as file:
        for _ in range(min(50_000, room.free_bytes // SMALL)):
            began = time.perf_counter()
            size = os.write(file, data)
            yield time.perf_counter() - began, size
    path.unlink()


def create(room: StorageRoom) -> Samples:
    """Files of 4 KiB in one folder, with no word about when they must be on the disk."""
    (room.folder / "many").mkdir()
    data = os.urandom(PAGE)
    for number in range(min(room.free_files, room.free_bytes // 2 // PAGE)):
        began = time.perf_counter()
        with _opened(room.folder / "many" / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            size = os.write(file, data)
        yield time.perf_counter() - began, size


def open_and_read(room: StorageRoom) -> Samples:
    for path in _files(room):
        began = time.perf_counter()
        with _opened(path, os.O_RDONLY) as file:
            size = len(os.read(file, PAGE))
        yield time.perf_counter() - began, size


def stat(room: StorageRoom) -> Samples:
    for path in _files(room):
        began = time.perf_counter()
        os.stat(path)
        yield time.perf_counter() - began, 0


def delete(room: StorageRoom) -> Samples:
    for path in _files(room):
        began = time.perf_counter()
        os.unlink(path)
        yield time.perf_counter() - began, 0


def _files(room: StorageRoom) -> list[str]:
    folder = room.folder / "many"
    return [entry.path for entry in os.scandir(folder)] if folder.exists() else []


def write_together(room: StorageRoom) -> Samples:
    """A file each by so many writers at once, on the disk at the end: as a checkpoint is written. The writers are threads, which
    the kernel treats as it does processes."""
    share = max(PAGE, min(room.free_bytes // 2, room.block_bytes) // room.writers)
    noise = _noise(min(CHUNK, share))
    while True:
        written = [0] * room.writers
        faults: list[OSError] = []
        began = time.perf_counter()
        _at_once(room, share, noise, written, faults)
        seconds = time.perf_counter() - began
        for path in room.folder.glob("rank*"):
            path.unlink()
        yield seconds, sum(written)
        if faults:
            raise faults[0]


def _at_once(
    room: StorageRoom, share: int, noise: mmap.mmap, written: list[int], faults: list[OSError]
) -> None:
    """`written`: bytes of each writer. An interrupt waits for all of them, so that none makes a file where the folder is being deleted."""
    over = threading.Event()

    def write(writer: int) -> None:
        try:
            with _opened(room.folder / f"rank{writer}", os.O_WRONLY | os.O_CREAT) as file:
                while written[writer] < share and not over.is_set():
                    written[writer] += _write(file, noise, min(CHUNK, share - written[writer]))
                os.fsync(file)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(room.writers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        over.set()
        for thread in threads:
            thread.join()


DSYNC = os.O_DSYNC


def _direct() -> int:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, "no direct I/O on this system")
    return os.O_DIRECT


@contextlib.contextmanager
def _opened(path: Path | str, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _noise(size: int) -> mmap.mmap:
    """Bytes that cannot be compressed, where direct I/O wants them: at the beginning of a page."""
    noise = mmap.mmap(-1, size)
    noise.write(os.urandom(size))
    return noise


def _write(file: int, noise: mmap.mmap, size: int) -> int:
    """In one call of the kernel, which may write less."""
    whole, rest = divmod(size, len(noise))
    return os.writev(file, [noise] * whole + [memoryview(noise)[:rest]] * bool(rest))


def drop_cache(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags
        )
        del start
    return 1.0 if failed else sum(flag & 1 for flag in flags) / len(flags)

"""Memory that the ranks of one machine share."""

import contextlib
import mmap
import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

UNAVAILABLE = -1  # in place of a file descriptor
TOKEN_BYTES = 7  # an int64 holds them
# Ranks whose files differ may have other processes under the same numbers, or a network between them.
MACHINE = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net")


@dataclass
class SharedMemory:
    """Memory of each rank, which all can read and write.

    by_rank: uint8 of shape (size,). lock_file: the memory of the first rank as an open file, to lock.
    """

    by_rank: list[Tensor]
    lock_file: int

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.lock_file)


def open_shared_memory(size: int) -> SharedMemory | None:
    """Return memory of `size` bytes of each rank. A collective.

    Returns None on all ranks unless they run on one machine and may open each other's memory. The memory has
    no name, and ends with the processes.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    file = _create(size, token)
    try:
        memory = _open_all(_gather([*_describe_machine(), os.getpid(), file, _as_number(token)]), size)
        # Afterwards, all ranks have opened the file.
        is_open = torch.tensor(memory is not None, dtype=torch.int32)
        dist.all_reduce(is_open, dist.ReduceOp.MIN)
    finally:
        if file != UNAVAILABLE:
            os.close(file)
    return memory if is_open.item() else None


def _create(size: int, token: bytes) -> int:
    """Return the file descriptor of new memory that begins with the token, or UNAVAILABLE."""
    try:
        file = os.memfd_create("paceline", os.MFD_CLOEXEC)
    except OSError:
        return UNAVAILABLE
    try:
        os.posix_fallocate(file, 0, size)  # without it, missing memory would end a later access by a signal
        os.pwrite(file, token, 0)
    except OSError:
        os.close(file)
        return UNAVAILABLE
    return file


def _describe_machine() -> list[int]:
    """Return numbers that are equal on two ranks if these share processes and network; 0 if unknown."""
    return [_read_identity(Path(path)) for path in MACHINE]


def _read_identity(path: Path) -> int:
    try:
        text = os.readlink(path) if path.is_symlink() else path.read_text()
    except OSError:
        return 0
    return zlib.crc32(text.encode())


def _as_number(token: bytes) -> int:
    return int.from_bytes(token, "big")


def _gather(row: list[int]) -> list[list[int]]:
    """Return the row of each rank. A collective."""
    rows = [torch.empty(len(row), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(row))
    return [of_rank.tolist() for of_rank in rows]


def _open_all(rows: list[list[int]], size: int) -> SharedMemory | None:
    """Return the memory of each rank, given its row; None if this rank cannot open all of them."""
    machines = {tuple(row[: len(MACHINE)]) for row in rows}
    if len(machines) > 1 or 0 in machines.pop() or any(row[-2] == UNAVAILABLE for row in rows):
        return None
    with contextlib.ExitStack() as files:
        memory, opened = [], []
        for *_, process, file, token in rows:
            try:
                opened.append(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
                files.callback(os.close, opened[-1])
                mapped = mmap.mmap(opened[-1], size)
            except (OSError, ValueError):  # ValueError: another file, which is smaller
                return None
            if _as_number(mapped[:TOKEN_BYTES]) != token:
                return None
            memory.append(torch.frombuffer(mapped, dtype=torch.uint8))
        return SharedMemory(memory, os.dup(opened[0]))

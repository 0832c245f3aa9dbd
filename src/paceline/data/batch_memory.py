"""Memory in which worker processes pass the bytes of samples to their rank, without pickling them."""

import contextlib
import itertools
import mmap
import pickle
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from torch.utils.data import get_worker_info

SLOT_BYTES = 2**25  # of addresses; memory is used as far as a batch fills it
MIN_BYTES = 2**16  # less is pickled
MAX_FIELDS = 32  # of a batch, among which bytes are searched for
MAX_DEPTH = 3
FREE, USED = b"\0", b"\1"

_numbers = itertools.count()
_memories: "weakref.WeakValueDictionary[int, BatchMemory]" = weakref.WeakValueDictionary()


class BatchMemory:
    """Slots for the bytes of batches, which a process shares with the workers that it forks.

    A worker copies the bytes of a batch into a slot that is free, and marks it as used. The rank makes its
    own bytes of them, and marks the slot as free. Nobody waits: without a free slot, a batch is pickled.

    slots: of each worker; more than the batches that it reads ahead.
    """

    def __init__(self, workers: int, slots: int):
        self.number, self.slots = next(_numbers), slots
        self.contents = mmap.mmap(-1, workers * slots * SLOT_BYTES)
        self.marks = mmap.mmap(-1, workers * slots)
        _memories[self.number] = self

    @classmethod
    def open(cls, workers: int, slots: int) -> "BatchMemory | None":
        """Return the memory of some workers; None if the system has no addresses for it."""
        with contextlib.suppress(OSError):
            return cls(workers, slots)
        return None

    def find_free_slot(self, worker: int) -> int | None:
        """Return a free slot of a worker; None if there is none."""
        slot = self.marks.find(FREE, worker * self.slots, (worker + 1) * self.slots)
        return slot if slot >= 0 else None


class BytesWriter:
    """Copies the bytes of a batch into a slot, which is chosen when there are many bytes."""

    def __init__(self, memory: BatchMemory, worker: int):
        self.memory, self.worker = memory, worker
        self.slot: int | None = None
        self.used = 0

    def replace(self, value: Any, depth: int = 0) -> Any:
        """Return a batch in which what was stored stands for lists and tuples of bytes."""
        kind = type(value)
        if kind is dict and len(value) <= MAX_FIELDS and depth < MAX_DEPTH:
            return {key: self.replace(field, depth + 1) for key, field in value.items()}
        if kind not in (list, tuple) or not value:
            return value
        if type(value[0]) is bytes:
            return self._store(value) if all(type(each) is bytes for each in value) else value
        if len(value) <= MAX_FIELDS and depth < MAX_DEPTH:
            return kind([self.replace(field, depth + 1) for field in value])
        return value

    def _store(self, contents: Sequence[bytes]) -> "_StoredBytes | Sequence[bytes]":
        sizes = [len(content) for content in contents]
        total = sum(sizes)
        if total < MIN_BYTES or self.used + total > SLOT_BYTES:
            return contents
        if self.slot is None:
            self.slot = self.memory.find_free_slot(self.worker)
            if self.slot is None:
                return contents
            self.memory.marks[self.slot : self.slot + 1] = USED
        begin = end = self.slot * SLOT_BYTES + self.used
        self.used += total
        target = self.memory.contents
        for content, size in zip(contents, sizes, strict=True):
            target[end : end + size] = content
            end += size
        return _StoredBytes(self.memory.number, begin, sizes, type(contents))


class _StoredBytes:
    """A list or tuple of bytes whose contents are in a slot; it becomes the list or tuple when unpickled."""

    def __init__(self, memory: int, begin: int, sizes: Sequence[int], kind: type):
        self.parameters = memory, begin, struct.pack(f"{len(sizes)}I", *sizes), kind

    def __reduce__(self) -> Any:
        return _take, self.parameters


def _take(memory: int, begin: int, packed: bytes, kind: type) -> Any:
    contents = _memories[memory].contents
    sizes = struct.unpack(f"{len(packed) // 4}I", packed)
    ends = itertools.accumulate(sizes, initial=begin)
    return kind([contents[end : end + size] for end, size in zip(ends, sizes, strict=False)])


def store_bytes(batch: Any, memory: BatchMemory | None) -> tuple[Any, tuple[int, int] | None]:
    """Return a batch to pickle, and the slot that `load` must free, if the batch uses one.

    It must be called in a worker process of a DataLoader, or nothing is stored.
    """
    worker = get_worker_info()
    if memory is None or worker is None:
        return batch, None
    writer = BytesWriter(memory, worker.id)
    batch = writer.replace(batch)
    return batch, (memory.number, writer.slot) if writer.slot is not None else None


def load(content: bytes, place: tuple[int, int] | None) -> Any:
    """Return the batch that was pickled, and free its slot."""
    batch = pickle.loads(content)
    if place is not None:
        number, slot = place
        _memories[number].marks[slot : slot + 1] = FREE
    return batch

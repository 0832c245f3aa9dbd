"""Exchange of tensors between the ranks of one machine, through memory that they share.

gloo sends through sockets, and several of its threads wake up for each message. Here each rank writes to
shared memory and reads what the others wrote, after a barrier.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.shared_barrier import SharedMemoryBarrier
from paceline.distributed.shared_memory import SharedMemory, open_shared_memory
from paceline.plan.cost_model.constants import MAX_SHARED_RANKS

SLOT_BYTES = 4 * 2**20
SLOTS = 2  # a rank may write one while others still read the other
BARRIER_BYTES = 8 * (1 + MAX_SHARED_RANKS)
ALIGNMENT = 16  # of a slot: the largest element


class SharedMemoryExchange:
    """Averages and gathers tensors of all ranks. All ranks must make the same calls in the same order.

    memory: of each rank, SLOTS slots of equal size and BARRIER_BYTES, which are zero before.
    """

    def __init__(self, memory: SharedMemory):
        begin = len(memory.by_rank[0]) - BARRIER_BYTES
        self._barrier = SharedMemoryBarrier(memory, begin)
        self._slot_bytes = begin // SLOTS // ALIGNMENT * ALIGNMENT
        self._slots = [
            [of_rank[slot * self._slot_bytes :][: self._slot_bytes] for of_rank in memory.by_rank]
            for slot in range(SLOTS)
        ]
        self._own, self._next = dist.get_rank(), 0

    def average_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its mean over the ranks. The result is equal bit for bit on all."""
        for part in tensor.view(-1).split(self._slot_bytes // tensor.element_size()):
            parts = [slot[: part.nbytes].view(part.dtype) for slot in self._take_slot()]
            # As DistributedDataParallel does, each rank divides before the sum, which then cannot overflow.
            torch.mul(part, 1 / len(parts), out=parts[self._own])
            self._barrier()
            torch.add(parts[0], parts[1], out=part)
            for other in parts[2:]:
                part += other

    def gather_(self, received: Tensor, sent: Tensor) -> None:
        """Write the bytes of each rank to a row of `received`.

        sent: uint8 of shape (bytes,), the same number on all ranks. received: (ranks, bytes).
        """
        for begin in range(0, len(sent), self._slot_bytes):
            part = sent[begin : begin + self._slot_bytes]
            slots = self._take_slot()
            slots[self._own][: len(part)] = part
            self._barrier()
            for row, slot in zip(received, slots, strict=True):
                row[begin : begin + len(part)] = slot[: len(part)]

    def _take_slot(self) -> list[Tensor]:
        """Return the slot of each rank for the next exchange.

        A rank writes to a slot again after the next exchange has waited for all ranks. They have read it
        then.
        """
        slots = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        return slots


_exchanges: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryExchange | None] = WeakKeyDictionary()


def find_exchange() -> SharedMemoryExchange | None:
    """Return the exchange between the ranks of the default process group.

    A collective at its first call. None: the ranks are not on one machine, or too many, or use another back
    end than gloo.
    """
    group = dist.distributed_c10d._get_default_group()
    if group not in _exchanges:
        _exchanges[group] = None
        if 2 <= dist.get_world_size() <= MAX_SHARED_RANKS and "gloo" in dist.get_backend():
            memory = open_shared_memory(SLOTS * SLOT_BYTES + BARRIER_BYTES)
            _exchanges[group] = SharedMemoryExchange(memory) if memory is not None else None
    return _exchanges[group]


def is_whole_world(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group has the ranks of the default process group in their order."""
    return group is None or dist.get_process_group_ranks(group) == list(range(dist.get_world_size()))


def default_group_name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def _average_through_memory_(tensor: Tensor, group_name: str) -> None:
    exchange = find_exchange()
    assert exchange is not None, "the caller found it before"
    exchange.average_(tensor)


def _gather_through_memory_(received: Tensor, sent: Tensor, group_name: str) -> None:
    exchange = find_exchange()
    assert exchange is not None, "the caller found it before"
    exchange.gather_(received, sent)


# Operators, so that what observes operators sees an exchange of these bytes: `paceline comms` counts them as
# the collectives that they replace.
_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("average_through_memory_(Tensor(a!) tensor, str group_name) -> ()")
_LIBRARY.impl("average_through_memory_", _average_through_memory_, "CPU")
_LIBRARY.define("gather_through_memory_(Tensor(a!) received, Tensor sent, str group_name) -> ()")
_LIBRARY.impl("gather_through_memory_", _gather_through_memory_, "CPU")

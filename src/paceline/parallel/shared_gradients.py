"""The mean of gradients over the ranks of one machine, through memory that they share.

gloo sends the buckets of DistributedDataParallel through sockets, and several of its threads wake up for each
message. Here each rank writes its bucket to shared memory and reads those of the others. Only an all-reduce
of one number tells the ranks when they may read, so that lost and late ranks are found as in any collective.
"""

import time
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.shared_memory import open_shared_memory

MAX_RANKS = 8  # each rank reads the gradients of all others
SLOT_BYTES = 4 * 2**20
WARM_UP_PASSES = 5  # of which times are not counted
SLOTS = 2  # a rank may write one while others still read the other


class ExchangeTimes:
    """The time in which a model averages gradients, without the first passes."""

    def __init__(self) -> None:
        self.seconds, self.passes = 0.0, -WARM_UP_PASSES

    def add(self, seconds: float, is_last: bool) -> None:
        """Add the time of a bucket."""
        self.seconds += seconds if self.passes >= 0 else 0.0
        self.passes += is_last


_times: WeakKeyDictionary[DistributedDataParallel, ExchangeTimes] = WeakKeyDictionary()


def measure_exchange_s(model: DistributedDataParallel) -> float | None:
    """Return the seconds of a backward pass in which a model averages gradients and waits for other ranks.

    DistributedDataParallel does not know it, since its hook returns when all is done. None: it is not known,
    or the model does not share memory."""
    times = _times.get(model)
    return times.seconds / times.passes if times is not None and times.passes > 0 else None


class SharedMemoryMean:
    """Averages tensors over all ranks. All ranks must average equal shapes in the same order.

    memory: of each rank, uint8 of shape (SLOTS × SLOT_BYTES,).
    """

    def __init__(self, memory: list[Tensor]):
        self._slots = [[of_rank.view(SLOTS, -1)[slot] for of_rank in memory] for slot in range(SLOTS)]
        self._slot_bytes = len(self._slots[0][0])
        self._own, self._next = dist.get_rank(), 0
        self._arrived = torch.zeros(1)

    def average_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its mean over the ranks. The result is equal bit for bit on all."""
        for part in tensor.view(-1).split(self._slot_bytes // tensor.element_size()):
            self._average_part_(part)

    def _average_part_(self, part: Tensor) -> None:
        """Average as many elements as fit into a slot.

        A rank writes to a slot again after the next call has waited for all ranks. They have read it then.
        """
        parts = [slot[: part.nbytes].view(part.dtype) for slot in self._slots[self._next]]
        self._next = (self._next + 1) % SLOTS
        # As DistributedDataParallel does, each rank divides before the sum, so that the sum cannot overflow.
        torch.mul(part, 1 / len(parts), out=parts[self._own])
        dist.all_reduce(self._arrived)
        torch.add(parts[0], parts[1], out=part)
        for other in parts[2:]:
            part += other


_means: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryMean | None] = WeakKeyDictionary()


def _find_mean() -> SharedMemoryMean | None:
    """Return what averages over the ranks of the default process group; None: it cannot. A collective."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _means:
        memory = open_shared_memory(SLOTS * SLOT_BYTES)
        _means[group] = SharedMemoryMean(memory) if memory is not None else None
    return _means[group]


def _average_through_memory_(gradients: Tensor, group_name: str) -> None:
    mean = _find_mean()
    assert mean is not None, "share_gradients found memory before"
    mean.average_(gradients)


# An operator, so that what observes operators sees an average of these bytes: `paceline comms` counts it as
# the all-reduce that it replaces.
_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define("average_through_memory_(Tensor(a!) gradients, str group_name) -> ()")
_LIBRARY.impl("average_through_memory_", _average_through_memory_, "CPU")


def share_gradients(model: DistributedDataParallel) -> None:
    """Let `model` average its gradients through shared memory, if all ranks are on one machine. A collective.

    Models on other devices, and those with many ranks, keep the collectives of their back end.
    """
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not is_on_cpu or not 2 <= dist.get_world_size() <= MAX_RANKS or "gloo" not in dist.get_backend():
        return
    if _find_mean() is None:
        return
    group_name = dist.distributed_c10d._get_default_group().group_name

    _times[model] = times = ExchangeTimes()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        began_s = time.perf_counter()
        averaged: torch.futures.Future[Tensor] = torch.futures.Future()
        gradients = bucket.buffer()
        if gradients.is_sparse:
            dist.all_reduce(gradients)
            gradients = gradients / dist.get_world_size()
        else:
            torch.ops.paceline.average_through_memory_(gradients, group_name)
        averaged.set_result(gradients)
        times.add(time.perf_counter() - began_s, bucket.is_last())
        return averaged

    model.register_comm_hook(None, hook)

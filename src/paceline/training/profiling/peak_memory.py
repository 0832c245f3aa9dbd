"""Memory of a rank at the peak of a step: tensors that stay, and temporary allocations."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.distributed.dtensor import is_materialized, local_tensor
from paceline.training.init.named_tensors import named_tensors
from paceline.training.optimization.optimizer import local_optimizer

StorageBytes = dict[int, int]  # by address


class ProfiledState(NamedTuple):
    """The tensors of a training on this rank, for its memory."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    params: Sequence[nn.Parameter]  # that have gradients
    averages: Mapping[str, Tensor] = MappingProxyType({})  # of Ema


class Allocation(NamedTuple):
    """An allocation, or a release if `bytes` is negative."""

    time_ns: int
    address: int
    bytes: int


class PeakMemory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # and everything else that lives for part of a step

    @property
    def total(self) -> float:
        return sum(self)


def count_weight_bytes(state: ProfiledState) -> int:
    """Return the bytes of this rank's parameters and buffers, and of the moving averages of Ema."""
    tensors = (*named_tensors(state.model).values(), *state.averages.values())
    return sum(find_storages(tensor for tensor in tensors if is_materialized(tensor)).values())


def count_optimizer_bytes(state: ProfiledState) -> int:
    """Return the bytes of this rank's optimizer state."""
    states = [
        values for optimizer in state.optimizers for values in local_optimizer(optimizer).state.values()
    ]
    return sum(
        find_storages(
            value for values in states for value in values.values() if isinstance(value, Tensor)
        ).values()
    )


@torch.no_grad()
def find_storages(tensors: Iterable[Tensor]) -> StorageBytes:
    """Return the storages of this rank's parts of `tensors`; views of one storage count once."""
    own = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in own if storage.nbytes()}


def find_allocations(tree: Iterable[Any], device: torch.device) -> list[Allocation]:
    """Return the allocations in a profiler's tree of events, in order of time."""
    allocations = []
    pending = list(tree)
    while pending:
        node = pending.pop()
        pending += node.children
        if node.name == "[memory]" and node.extra_fields.device.type == device.type:
            allocations.append(
                Allocation(node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size)
            )
    return sorted(allocations)


def measure_peak(
    constant_bytes: tuple[int, int],
    grads: StorageBytes,
    allocations: Sequence[Allocation],
    begin_ns: int,
    marked_ns: int,
    end_ns: int,
) -> PeakMemory:
    """Return the memory at the peak between `begin_ns` and `end_ns`.

    `constant_bytes`: of weights and of optimizer state. `grads`: gradients that exist at `marked_ns`.
    """
    live, peak_bytes, peak_ns = _LiveBlocks(), 0, begin_ns
    for allocation in allocations:
        if allocation.time_ns > end_ns:
            break
        live.add(allocation)
        if allocation.time_ns >= begin_ns and live.bytes > peak_bytes:
            peak_bytes, peak_ns = live.bytes, allocation.time_ns
    created_ns = {
        allocation.address: allocation.time_ns
        for allocation in allocations
        if allocation.bytes > 0 and allocation.time_ns <= marked_ns
    }
    # In buckets that stay allocated.
    old = sum(size for address, size in grads.items() if address not in created_ns)
    new = sum(
        size for address, size in grads.items() if address in created_ns and created_ns[address] <= peak_ns
    )
    return PeakMemory(constant_bytes[0], old + new, constant_bytes[1], max(0, peak_bytes - new))


class _LiveBlocks:
    """Allocated blocks of memory.

    Releases by other threads are not recorded: a block ends at the latest when another begins inside it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: StorageBytes = {}
        self._addresses: list[int] = []  # sorted

    def add(self, allocation: Allocation) -> None:
        address = allocation.address
        if allocation.bytes <= 0:
            if address in self._sizes:
                self._drop(bisect_left(self._addresses, address))
            return
        at = bisect_left(self._addresses, address)
        if at and self._addresses[at - 1] + self._sizes[self._addresses[at - 1]] > address:
            at -= 1
            self._drop(at)
        while at < len(self._addresses) and self._addresses[at] < address + allocation.bytes:
            self._drop(at)
        self._addresses.insert(at, address)
        self._sizes[address] = allocation.bytes
        self.bytes += allocation.bytes

    def _drop(self, at: int) -> None:
        self.bytes -= self._sizes.pop(self._addresses.pop(at))

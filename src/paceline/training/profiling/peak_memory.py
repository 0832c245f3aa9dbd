"""What a rank holds at the fullest moment of a step: tensors that stay, and allocations between."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.distributed.dtensor import is_materialized, local_tensor
from paceline.training.init.named_tensors import named_tensors
from paceline.training.optimizer import local_optimizer
from paceline.training.setup import PreparedTraining

Storages = dict[int, int]  # bytes by address


class Allocation(NamedTuple):
    """`bytes`: below 0 where they are given back."""

    time_ns: int
    address: int
    bytes: int


class PeakMemory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # and whatever else lives for a part of a step

    @property
    def total(self) -> float:
        return sum(self)


def weights(laid: PreparedTraining) -> int:
    """Bytes of the parameters and buffers here."""
    return sum(
        storages(tensor for tensor in named_tensors(laid.model).values() if is_materialized(tensor)).values()
    )


def optimizer_state(laid: PreparedTraining) -> int:
    states = local_optimizer(laid.step.optimizer).state.values()
    return sum(
        storages(value for state in states for value in state.values() if isinstance(value, Tensor)).values()
    )


def gradients(laid: PreparedTraining) -> Storages:
    return storages(parameter.grad for parameter in laid.step.params if parameter.grad is not None)


@torch.no_grad()
def storages(tensors: Iterable[Tensor]) -> Storages:
    """Of what this rank holds of them; views of one memory count once."""
    own = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in own if storage.nbytes()}


def allocations(tree: Iterable[Any], device: torch.device) -> list[Allocation]:
    """Of a profiler's tree of events, in order."""
    found = []
    left = list(tree)
    while left:
        node = left.pop()
        left += node.children
        if node.name == "[memory]" and node.extra_fields.device.type == device.type:
            found.append(Allocation(node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
    return sorted(found)


def held(
    stays: tuple[int, int],
    grads: Storages,
    happened: Sequence[Allocation],
    begin_ns: int,
    marked_ns: int,
    end_ns: int,
) -> PeakMemory:
    """`stays`: weights and optimizer state. `grads`: at `marked_ns`. The peak is looked for between begin and end."""
    alive, most, peak_ns = _Alive(), 0, begin_ns
    for one in happened:
        if one.time_ns > end_ns:
            break
        alive.note(one)
        if one.time_ns >= begin_ns and alive.bytes > most:
            most, peak_ns = alive.bytes, one.time_ns
    born = {one.address: one.time_ns for one in happened if one.bytes > 0 and one.time_ns <= marked_ns}
    old = sum(size for address, size in grads.items() if address not in born)  # in buckets that stay
    new = sum(size for address, size in grads.items() if address in born and born[address] <= peak_ns)
    return PeakMemory(stays[0], old + new, stays[1], max(0, most - new))


class _Alive:
    """Blocks of memory. What other threads give back is not seen: a block is gone at the latest where another one begins in it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: Storages = {}
        self._addresses: list[int] = []  # in order

    def note(self, one: Allocation) -> None:
        if one.bytes <= 0:
            if one.address in self._sizes:
                self._drop(bisect_left(self._addresses, one.address))
            return
        at = bisect_left(self._addresses, one.address)
        if at and self._addresses[at - 1] + self._sizes[self._addresses[at - 1]] > one.address:
            at -= 1
            self._drop(at)
        while at < len(self._addresses) and self._addresses[at] < one.address + one.bytes:
            self._drop(at)
        self._addresses.insert(at, one.address)
        self._sizes[one.address] = one.bytes
        self.bytes += one.bytes

    def _drop(self, at: int) -> None:
        self.bytes -= self._sizes.pop(self._addresses.pop(at))

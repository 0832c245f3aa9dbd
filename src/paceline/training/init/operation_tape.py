"""Tape of the operations of a constructor, and their replay for one tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from paceline.distributed.dtensor import storage_id

CPU, META = torch.device("cpu"), torch.device("meta")
UNINITIALIZED = {  # operations whose result has undefined values
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


def is_on_meta(tensor: Tensor) -> bool:
    """Return whether `tensor` is on the meta device, even while it reports that it is on the CPU."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def is_uninitialized(run: Any) -> bool:
    """Return whether the result of the operation `run` has undefined values."""
    return getattr(run, "overloadpacket", None) in UNINITIALIZED


def poison_(tensor: Tensor, second: bool) -> None:
    """Fill uninitialized memory with recognizable values: NaN for floats.

    `second`: use other values than in the first construction.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(1.0 if second else math.nan)
    elif not tensor.is_quantized:
        tensor.fill_(1 if second else 0)


def may_be_poisoned(tensor: Tensor) -> bool:
    """Return whether `tensor` may contain poison: floats show it, other types always may."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isnan((tensor if tensor.element_size() > 1 else tensor.float()).sum()))


def unequal(first: Tensor, second: Tensor) -> Tensor:
    """Return a mask of the elements in which two tensors of the same shape differ; NaN equals NaN."""
    first, second = (
        tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        for tensor in (first, second)
    )
    return (first != second) & ~((first != first) & (second != second))


def _snapshot(item: Any) -> Any:
    """Detach a tensor from later changes: `model.double()` replaces `.data`, and real values may change."""
    if not isinstance(item, Tensor):
        return item
    return item.detach() if is_on_meta(item) else item.detach().clone()


@dataclass
class RecordedOperation:
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    reads: list[int]  # storages
    writes: list[int]  # storages, including those that it creates
    random: bool
    seed: int = 0


@dataclass
class OperationTape:
    """The operations of a constructor on the meta device."""

    seed: int  # of torch's generator at the start of the constructor
    operations: list[RecordedOperation] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> indices of operations
    is_complete: bool = True  # a replay gives the same as the constructor

    def add(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        written: list[Tensor],
        random: bool,
    ) -> None:
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
        results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
        reads = [storage_id(item) for item in inputs]
        self.is_complete &= all(not is_on_meta(item) or storage_id(item) in self.writers for item in inputs)
        if random:  # a replay uses other random numbers, so the user must not have chosen them
            has_generator = any(isinstance(item, torch.Generator) for item in tree_flatten((args, kwargs))[0])
            self.is_complete &= not has_generator and torch.default_generator.initial_seed() == self.seed
        writes = [storage_id(item) for item in written] + [
            storage for item in results if (storage := storage_id(item)) not in reads
        ]
        if writes:  # operations without writes create views
            for storage in set(writes):
                self.writers.setdefault(storage, []).append(len(self.operations))
            args, kwargs, results = tree_map(_snapshot, (args, kwargs, results))
            self.operations.append(RecordedOperation(run, args, kwargs, results, reads, writes, random))

    def leading_to(self, storage: int) -> list[RecordedOperation]:
        """Return the operations that the content of `storage` depends on, in order."""
        indices: set[int] = set()
        pending, visited = [storage], {storage}
        while pending:
            for index in self.writers.get(pending.pop(), []):
                if index not in indices:
                    indices.add(index)
                    new = set(self.operations[index].reads + self.operations[index].writes) - visited
                    visited |= new
                    pending += new
        return [self.operations[index] for index in sorted(indices)]


def replay(operations: list[RecordedOperation], origin: Tensor, second: bool) -> Tensor:
    """Run `operations` for real, and return the tensor that `origin` on the meta device stands for.

    `second`: as for `poison_`.
    """
    contents: dict[int, Tensor] = {}  # storage -> all its elements, one-dimensional

    def make_real(item: Any) -> Any:
        if isinstance(item, torch.device):
            return CPU
        if isinstance(item, Tensor) and item.is_meta:
            return view_as(contents[storage_id(item)], item)
        return item

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for operation in operations:
            if operation.random:
                torch.default_generator.manual_seed(operation.seed)
            result = operation.run(
                *tree_map(make_real, operation.args), **tree_map(make_real, operation.kwargs)
            )
            if is_uninitialized(operation.run):
                poison_(result, second)
            results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
            for stand_in, value in zip(operation.results, results, strict=True):
                if storage_id(stand_in) not in operation.reads:
                    contents[storage_id(stand_in)] = flatten_storage(value, stand_in)
    return view_as(contents[storage_id(origin)], origin)


def view_as(content: Tensor, like: Tensor) -> Tensor:
    """Return a view of a one-dimensional tensor with the size, stride and offset of `like`."""
    return content.as_strided(like.size(), like.stride(), like.storage_offset())


def flatten_storage(value: Tensor, stand_in: Tensor) -> Tensor:
    """Return all elements in the storage of `value`, in the order of the storage of `stand_in`."""
    if value.stride() != stand_in.stride() or value.storage_offset() != stand_in.storage_offset():
        value = torch.empty_strided(stand_in.size(), stand_in.stride(), dtype=value.dtype).copy_(value)
    return value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)

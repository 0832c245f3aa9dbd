"""Batches: tensors in nested tuples, lists, dicts and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map


def map_leaves(function: Callable[[Any], Any], batch: Any, *leaves: type) -> Any:
    """Return a copy of a batch with `function` applied to each of its leaves.

    Tuples, named tuples, lists, dicts and other mappings, dataclasses, and classes that are registered with
    torch's pytree may be nested. Everything else is a leaf, and so are a PackedSequence and `leaves`.
    """
    if isinstance(batch, (Tensor, PackedSequence, *leaves)):
        return function(batch)
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = map_leaves(function, value, *leaves)
        return changed
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = [map_leaves(function, item, *leaves) for item in batch]
        return changed
    if type(batch) is tuple or (isinstance(batch, tuple) and hasattr(batch, "_make")):
        items = [map_leaves(function, item, *leaves) for item in batch]
        return batch._make(items) if hasattr(batch, "_make") else tuple(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it would call the constructor, which may check or change its arguments.
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(
                    changed, field.name, map_leaves(function, getattr(batch, field.name), *leaves)
                )
        return changed
    return tree_map(function, batch)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a copy of a batch with `function` applied to each of its tensors.

    The batch sizes of a PackedSequence stay as they are: torch requires them on the CPU.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            indices = (leaf.sorted_indices, leaf.unsorted_indices)
            return PackedSequence(
                function(leaf.data),
                leaf.batch_sizes,
                *(function(tensor) if tensor is not None else None for tensor in indices),
            )
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(apply, batch)


def find_leaves(batch: Any, *leaves: type) -> list[Any]:
    """Return the leaves of a batch, as `map_leaves` defines them."""
    found: list[Any] = []

    def find(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(find, batch, *leaves)
    return found


def find_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, as `map_tensors` finds them."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(find, batch)
    return found


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with all its floating-point tensors in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def move(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Return the batch with all its tensors on `device`."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch, which is that of its first tensor; 1 if it has none."""
    for leaf in find_leaves(batch):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1

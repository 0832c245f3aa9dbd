"""Parts of a batch and of an output, to compare what a task computes on them with that on the whole."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batch import find_leaves
from paceline.distributed.dtensor import is_dtensor

Slicer = Callable[[Any], Any]  # returns one of the two parts of what belongs to a batch
# How the samples may be ordered in a tensor.
ORDERS = ("samples first", "views first", "second dim")


def find_cuts(samples: int) -> list[int]:
    """Return the positions at which a batch is cut in two."""
    return sorted({samples // 2, max(1, samples // 4)})


def build_slicers(samples: int, cut: int, order: str) -> list[Slicer]:
    """Return two functions that take what belongs to a batch, and return its part before or after `cut`."""

    def build(begin: int, end: int) -> Slicer:
        return lambda tree: map_parts(
            tree, lambda item: _slice_samples(item, begin, end, samples, order), samples, (begin, end)
        )

    return [build(0, cut), build(cut, samples)]


def _slice_samples(item: Any, begin: int, end: int, samples: int, order: str) -> Any:
    """Return the rows of samples `begin` to `end` of a tensor or array; other items as they are."""
    if isinstance(item, np.ndarray):
        return item[begin:end] if item.ndim and len(item) == samples else item
    if not isinstance(item, Tensor):
        return item
    if order == ORDERS[2] and item.dim() > 1 and item.shape[1] == samples:
        return item[:, begin:end]
    if not has_samples(item, samples, 0):
        return item
    if order == ORDERS[1]:
        return item.unflatten(0, (-1, samples))[:, begin:end].flatten(0, 1)
    rows_per_sample = len(item) // samples
    return item[begin * rows_per_sample : end * rows_per_sample]


def has_samples(item: Any, samples: int, dim: int) -> bool:
    """Return whether a dimension counts the samples, or several items of each sample."""
    if not isinstance(item, Tensor) or item.dim() <= dim or not item.shape[dim]:
        return False
    return item.shape[dim] == samples or (dim == 0 and samples > 1 and item.shape[0] % samples == 0)


def map_parts(
    tree: Any, function: Callable[[Any], Any], samples: int | None = None, part: tuple[int, int] = (0, 0)
) -> Any:
    """Return the tree with `function` applied to all leaves.

    A list with an element for each sample is cut to the elements `part` instead.
    """

    def recurse(item: Any) -> Any:
        return map_parts(item, function, samples, part)

    if isinstance(tree, Mapping):
        mapped: Any = copy.copy(tree)
        for key in tree:
            mapped[key] = recurse(tree[key])
        return mapped
    if isinstance(tree, (list, tuple)):
        if len(tree) == samples and not any(
            has_samples(item, samples, 0) for item in find_leaves(list(tree))
        ):
            return tree[slice(*part)]
        items = [recurse(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: recurse(getattr(tree, name)) for name in fields})
    return function(tree)


def gather_detached(tree: Any) -> Any:
    """Return a tree with whole tensors in place of DTensors, all detached from the graph."""

    def gather(item: Any) -> Any:
        if is_dtensor(item):
            item = item.full_tensor()
        return item.detach() if isinstance(item, Tensor) else item

    return map_parts(tree, gather)


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's random generators after this context."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def is_any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any rank. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)

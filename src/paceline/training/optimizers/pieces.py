"""Pieces of tensors that fit into the cache, so that an update reads and writes memory once."""

import math
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

# An update has about four tensors of float32, and each of two threads has a cache of about 2 MiB.
PIECE_ELEMENTS = 2**17

Piece = tuple[list[int], list[list[Tensor]]]


def iterate_pieces(
    *lists: Sequence[Tensor],
    keys: Sequence[Hashable] | None = None,
    is_divided: bool = True,
    whole_from: float = math.inf,
) -> Iterator[Piece]:
    """Yield parts of tensors for element-wise operations: their indices in the lists, and a list per list.

    lists: of equal length, with tensors of equal shape at each index. Large tensors are divided, and small
    ones are together. keys: tensors with different keys, such as counts of steps, are in different pieces.
    is_divided: False if the update is one kernel, which needs no cache. An accelerator gets whole tensors,
    because it has few large kernels. whole_from: elements from which a tensor is a piece by itself.
    """
    together: dict[Hashable, list[tuple[int, list[Tensor]]]] = {}  # tensors of the next pieces, by key
    waiting: dict[Hashable, int] = {}  # their elements
    for at, first in enumerate(lists[0]):
        if not first.numel():
            continue
        key = keys[at] if keys is not None else None
        tensors = [of_kind[at] for of_kind in lists]
        on_cpu = first.device.type == "cpu"
        if on_cpu:
            tensors = _order_as_in_memory(tensors)
        if first.numel() >= whole_from:
            yield _join([(at, tensors)])
            continue
        limit = PIECE_ELEMENTS if on_cpu and is_divided else None
        if limit and first.numel() > limit and all(tensor.is_contiguous() for tensor in tensors):
            for parts in zip(*(tensor.view(-1).split(limit) for tensor in tensors), strict=True):
                yield [at], [[part] for part in parts]
            continue
        together.setdefault(key, []).append((at, tensors))
        waiting[key] = waiting.get(key, 0) + first.numel()
        if limit and waiting[key] >= limit:
            yield _join(together.pop(key))
            del waiting[key]
    for tensors_of_key in together.values():
        yield _join(tensors_of_key)


def _join(tensors: Sequence[tuple[int, list[Tensor]]]) -> Piece:
    lists = zip(*(of_kinds for _, of_kinds in tensors), strict=True)
    return [at for at, _ in tensors], [list(of_kind) for of_kind in lists]


def _order_as_in_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Return views with contiguous elements; the tensors if their elements have different orders."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors
    order = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    ordered = [tensor.permute(order) for tensor in tensors]
    return ordered if all(tensor.is_contiguous() for tensor in ordered) else tensors


def multiply_into(targets: Sequence[Tensor], parts: Sequence[Tensor], factor: float) -> None:
    """Write the products of tensors and a number into other tensors."""
    if parts[0].device.type != "cpu":
        torch._foreach_copy_(list(targets), list(parts))
        torch._foreach_mul_(list(targets), factor)
        return
    for target, part in zip(targets, parts, strict=True):
        torch.mul(part, factor, out=target)


class Scratch:
    """Memory for copies of one piece after another, which stays in the cache.

    New memory for each piece would cost more than the update itself, because the system fills it with zeros.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def copy(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of tensors, which are valid until the next call. An accelerator gets new memory."""
        blocks = self._blocks(parts)
        if blocks is None:
            return list(torch._foreach_clone(list(parts)))
        torch._foreach_copy_(blocks, list(parts))
        return blocks

    def lerp(self, starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
        """Return start + weight × (end - start) of pairs of tensors, in memory like that of `copy`."""
        blocks = self._blocks(starts)
        if blocks is None:
            return list(torch._foreach_lerp(list(starts), list(ends), weight))
        for block, start, end in zip(blocks, starts, ends, strict=True):
            torch.lerp(start, end, weight, out=block)
        return blocks

    def _blocks(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """Return memory for tensors like these; None if they need new memory."""
        first = parts[0]
        is_plain = all(part.is_contiguous() and part.dtype == first.dtype for part in parts)
        if first.device.type != "cpu" or not is_plain:
            return None
        sizes = [part.numel() for part in parts]
        if self._buffer is None or self._buffer.numel() < sum(sizes) or self._buffer.dtype != first.dtype:
            self._buffer = torch.empty(sum(sizes), dtype=first.dtype)
        blocks = self._buffer[: sum(sizes)].split(sizes)
        return [block.view(part.shape) for block, part in zip(blocks, parts, strict=True)]

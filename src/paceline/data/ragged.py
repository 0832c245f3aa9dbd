"""Ragged tensors of a batch, padded to the longest of the global batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import find_leaves, map_leaves


class Ragged:
    """Tensors of different shapes in a batch, from which Paceline makes one padded tensor.

        def collate(self, samples):
            return {"ids": Ragged([sample["ids"] for sample in samples]),
                    "labels": Ragged([sample["labels"] for sample in samples], padding_value=-100)}

    The padded tensor has the shape (samples, *longest): each dim is padded at its end to the longest of the
    global batch. So every rank and micro-batch has the shapes that one process has.

    tensors: one of each sample, with equal dtypes and numbers of dims.
    padding_value: what the padding contains.
    pad_to_multiple_of: what the first padded dim is rounded up to a multiple of.

    Raises ValueError for tensors that cannot be padded to one.
    """

    def __init__(self, tensors: Sequence[Tensor], padding_value: float = 0, pad_to_multiple_of: int = 1):
        kinds = {
            (tensor.dim(), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor) for tensor in tensors
        }
        if len(kinds) != 1 or not all(isinstance(tensor, Tensor) for tensor in tensors):
            found = ", ".join(sorted(map(_describe_kind, kinds))) or "none"
            raise ValueError(f"Ragged requires tensors of one dtype and number of dims, got {found}")
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {pad_to_multiple_of}")
        self.tensors, self.padding_value = tensors, padding_value
        self.pad_to_multiple_of = pad_to_multiple_of

    def pad(self) -> "PaddedTensor":
        """Return one tensor, padded to the longest of these."""
        longest = torch.tensor([tensor.shape for tensor in self.tensors]).amax(0).tolist()
        if longest:
            longest[0] += -longest[0] % self.pad_to_multiple_of
        first = self.tensors[0]
        padded = torch.full(
            (len(self.tensors), *longest), self.padding_value, dtype=first.dtype, device=first.device
        )
        for row, tensor in zip(padded, self.tensors, strict=True):
            row[tuple(map(slice, tensor.shape))] = tensor
        return PaddedTensor(padded, self.padding_value)


def _describe_kind(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else f"{kind[1]} with {kind[0]} dims"


@dataclass(frozen=True, eq=False)
class PaddedTensor:
    """A tensor that is padded to the longest of its micro-batch, until the longest of all is known."""

    data: Tensor
    padding_value: float

    def pad_to(self, size: Sequence[int]) -> Tensor:
        """Return the tensor with its dims after the first padded to `size`."""
        missing = [at_least - length for at_least, length in zip(size, self.data.shape[1:], strict=True)]
        if not any(missing):
            return self.data
        pads = [pad for count in reversed(missing) for pad in (0, count)]
        return F.pad(self.data, pads, value=self.padding_value)


Agree = Callable[[list[int]], list[int]]  # returns the largest of the numbers of all ranks, one by one


def pad_each(batch: Any) -> Any:
    """Return a batch with each Ragged padded to the longest of the batch."""
    return map_leaves(lambda leaf: leaf.pad() if isinstance(leaf, Ragged) else leaf, batch)


def pad_together(batches: Sequence[Any], agree: Agree = list) -> list[Any]:
    """Return batches with equal shapes of each tensor that was a Ragged: those of the longest.

    batches: the micro-batches of this rank in a step, as `pad_each` returns them.
    agree: a collective, called if a batch has a Ragged.
    """
    by_batch = [
        [leaf for leaf in find_leaves(batch, PaddedTensor) if isinstance(leaf, PaddedTensor)]
        for batch in batches
    ]
    if not by_batch[0]:
        return list(batches)
    longest = [
        max(sizes)
        for sizes in zip(
            *([n for leaf in found for n in leaf.data.shape[1:]] for found in by_batch), strict=True
        )
    ]
    remaining = iter(agree(longest))
    sizes = [[next(remaining) for _ in leaf.data.shape[1:]] for leaf in by_batch[0]]

    def pad(batch: Any) -> Any:
        own = iter(sizes)
        return map_leaves(
            lambda leaf: leaf.pad_to(next(own)) if isinstance(leaf, PaddedTensor) else leaf,
            batch,
            PaddedTensor,
        )

    return [pad(batch) for batch in batches]


def agree_on_longest(group: dist.ProcessGroup | None, device: torch.device) -> Agree:
    """Return a collective that returns the largest of the numbers of all ranks, one by one.

    group: of the ranks; None: all. device: for process groups without a back end for the CPU.
    """

    def agree(numbers: list[int]) -> list[int]:
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return numbers
        has_cpu = "cpu:" in dist.get_backend_config(group)
        longest = torch.tensor(numbers, device="cpu" if has_cpu else device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        return longest.tolist()

    return agree

"""Attention of trial passes, which shows whether a block can run on a slice of its sequences.

A pass on whole sequences records the arguments of each call. A pass on a slice compares its own arguments
with them: queries and keys must be those of the same positions. Then the rows of the recorded result are
what attention on slices would return.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.data.fake import is_close, is_fake
from paceline.parallel.context.replace_attention import AttentionArguments
from paceline.parallel.context.sliced_attention import SlicedTensors

RTOL = 1e-5  # parts of a model may compute in float32


class NotSliceable(RuntimeError):
    """An argument of attention on a slice is not a slice of the argument on whole sequences."""


@dataclass(frozen=True)
class _RecordedCall:
    arguments: AttentionArguments
    output: Tensor


@dataclass
class WholeTrial:
    """Records calls of attention, and returns a cheap function of their arguments."""

    calls: list[_RecordedCall] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences of queries, in the order of calls."""
        return [call.arguments.query.size(-2) for call in self.calls]

    def attend(self, arguments: AttentionArguments) -> Any:
        query, key, value = arguments.query, arguments.key, arguments.value
        if query.dim() > 2 and query.size(-3) != key.size(-3):  # grouped queries
            key, value = (
                tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value)
            )
        if query.size(-2) == key.size(-2):
            output = value * (1 + query.sum(-1, keepdim=True).sin()) + key.sum(-1, keepdim=True).sin()
        else:
            output = query[..., :1].sin() * value.sum(-2, keepdim=True)
        self.calls.append(_RecordedCall(arguments, output))
        return arguments.finish(output)


class SlicedTrial:
    """Compares the calls of attention in a pass on some positions with those of a pass on all of them."""

    def __init__(self, calls: Sequence[_RecordedCall], positions: Tensor, length: int):
        self.recorded, self.positions, self.length = iter(calls), positions, length
        self.calls: list[SlicedTensors] = []

    def attend(self, arguments: AttentionArguments) -> Any:
        """Return the result for the queries of the slice. Raises NotSliceable."""
        call = next(self.recorded, None)
        if call is None:
            raise NotSliceable("attention is called more often")
        whole = call.arguments
        has_own_queries = self._is_slice(arguments.query, whole.query, -2)
        has_own_keys = self._is_slice(arguments.key, whole.key, -2)
        if self._is_slice(arguments.value, whole.value, -2) != has_own_keys:
            raise NotSliceable("keys are those of a slice and values are not, or the reverse")
        if arguments.masks.keys() != whole.masks.keys():
            raise NotSliceable("attention has other masks")
        masks = {
            name: self._find_mask_slice(mask, whole.masks[name]) for name, mask in arguments.masks.items()
        }
        self.calls.append(SlicedTensors(has_own_queries, has_own_keys, masks))
        rows = call.output.index_select(-2, self.positions) if has_own_queries else call.output
        return arguments.finish(rows)

    def _is_slice(self, part: Tensor, whole: Tensor, dim: int) -> bool:
        """Return whether `part` is a slice of `whole` along a dimension; False if it is equal to `whole`."""
        is_slice = part.size(dim) != whole.size(dim)
        if is_slice and (whole.size(dim), part.size(dim)) != (self.length, len(self.positions)):
            raise NotSliceable(f"{part.size(dim)} of {whole.size(dim)} positions")
        if not is_close(part, whole.index_select(dim, self.positions) if is_slice else whole, RTOL):
            raise NotSliceable("queries, keys or values of a position differ")
        return is_slice

    def _find_mask_slice(self, part: Tensor, whole: Tensor) -> tuple[bool, bool]:
        """Return whether a mask has only the rows and the columns of the slice."""
        if part.dim() != whole.dim():
            raise NotSliceable("the dimensions of masks differ")
        sliced = [False, False]
        for dim in range(-min(2, part.dim()), 0):
            if part.size(dim) != whole.size(dim) == self.length:
                whole = whole.index_select(dim, self.positions)
                sliced[dim] = True
        # Exact, because the largest element of a mask is often the largest number.
        if part.shape != whole.shape or not (
            is_fake(part) or is_fake(whole) or torch.allclose(part, whole, RTOL, equal_nan=True)
        ):
            raise NotSliceable("masks of a position differ")
        return sliced[0], sliced[1]

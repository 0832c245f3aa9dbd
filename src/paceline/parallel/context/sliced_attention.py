"""Attention of the queries of a slice to all keys of the sequence.

Ring attention computes what has no mask or a causal one, on slices of equal length. Everything else (a mask,
an additive bias, dropout, slices of unequal lengths, keys of another sequence) gathers keys and values, and
computes the rows of this rank's queries with the original function.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.parallel.context.replace_attention import AttentionArguments
from paceline.parallel.context.ring_attention import RingAttention
from paceline.parallel.context.slices import (
    GatherForSlices,
    all_gather_slices,
    count_rank_positions,
    rank_positions,
)
from paceline.plan.plan import Plan


@dataclass(frozen=True)
class SlicedTensors:
    """Which tensors of a call of attention have only the positions of a slice."""

    query: bool
    key: bool  # and value
    # Whether each mask has only the rows and the columns of a slice
    masks: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)


class SlicedAttention:
    """Answers the calls of attention in one forward pass of a block on a slice of its sequences."""

    def __init__(self, ring: RingAttention, plan: Plan, length: int, calls: tuple[SlicedTensors, ...]):
        """length: of the whole sequences. calls: of attention in the block, in their order."""
        self.ring, self.mesh, self.plan, self.length = ring, ring.mesh, plan, length
        self.calls = iter(calls)
        self.count = count_rank_positions(length, self.mesh.get_local_rank(), self.mesh.size())

    def attend(self, arguments: AttentionArguments) -> Any:
        """Return the result for the queries of this rank.

        Raises PlanError if the call is not one of those in the first pass.
        """
        sliced = next(self.calls, None)
        expected = {
            name: self.count
            for name, is_sliced in (
                ("query", sliced and sliced.query),
                ("key", sliced and sliced.key),
                ("value", sliced and sliced.key),
            )
            if is_sliced
        }
        if sliced is None or any(
            getattr(arguments, name).size(-2) != size for name, size in expected.items()
        ):
            raise self._unexpected()
        arguments = _cast_for_autocast(arguments)
        if (is_causal := self._ring_mask(arguments, sliced)) is not None:
            assert arguments.ring_options is not None
            query, key, value = arguments.query, arguments.key, arguments.value
            return arguments.finish(
                self.ring(query, key, value, is_causal=is_causal, **arguments.ring_options)
            )
        return self._attend_to_gathered(arguments, sliced)

    def _ring_mask(self, arguments: AttentionArguments, sliced: SlicedTensors) -> bool | None:
        """Return whether ring attention is causal; None if it cannot compute this call."""
        query, key, value = arguments.query, arguments.key, arguments.value
        if (
            arguments.ring_options is None
            or not (sliced.query and sliced.key)
            or self.length % self.mesh.size()
            or key.shape != value.shape
            or (*query.shape[:-3], query.shape[-1]) != (*key.shape[:-3], key.shape[-1])
            or (query.shape != key.shape and not arguments.ring_options["enable_gqa"])
        ):
            return None
        if not arguments.masks:
            return arguments.is_causal
        if len(arguments.masks) > 1:
            return None
        return read_causal_mask(next(iter(arguments.masks.values())), self.length)

    def _unexpected(self) -> PlanError:
        return PlanError(
            f"plan {self.plan}: a block calls attention in another way than in the first pass; use a plan "
            "without cp"
        )

    def _attend_to_gathered(self, arguments: AttentionArguments, sliced: SlicedTensors) -> Any:
        key, value = arguments.key, arguments.value
        if sliced.key:
            key, value = self._gather_both(key, value)
        masks = {
            name: self._own_rows(mask, sliced, *sliced.masks.get(name, (False, False)))
            for name, mask in arguments.masks.items()
        }
        is_causal = arguments.is_causal
        if is_causal and sliced.query:
            own = rank_positions(
                self.length, self.mesh.get_local_rank(), self.mesh.size(), arguments.query.device
            )
            visible = own[:, None] >= torch.arange(key.size(-2), device=own.device)
            masks["causal"] = visible.view(*[1] * (arguments.query.dim() - 2), *visible.shape)
            is_causal = False
        return arguments.compute(arguments.query, key, value, masks, is_causal)

    def _gather_both(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values, in one collective if possible."""
        if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
            key, value = (GatherForSlices.apply(part, -2, self.length, self.mesh) for part in (key, value))
            return key, value
        both: Tensor = GatherForSlices.apply(torch.cat([key, value], -1), -2, self.length, self.mesh)
        key, value = both.split([key.size(-1), value.size(-1)], -1)
        return key, value

    def _own_rows(
        self, mask: Tensor, sliced: SlicedTensors, has_own_rows: bool, has_own_columns: bool
    ) -> Tensor:
        """Return the rows of the queries of this rank, with the columns of all keys."""
        rows = mask.size(-2) if mask.dim() > 1 else 1
        if (has_own_rows and rows != self.count) or (has_own_columns and mask.size(-1) != self.count):
            raise self._unexpected()
        if sliced.query and not has_own_rows and rows > 1:
            if rows != self.length:
                raise self._unexpected()
            rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
            mask = mask.index_select(-2, rank_positions(self.length, rank, ranks, mask.device))
        if sliced.key and not has_own_columns and mask.size(-1) not in (1, self.length):
            raise self._unexpected()
        if not has_own_columns:
            return mask
        if mask.is_floating_point():
            gathered: Tensor = GatherForSlices.apply(mask, -1, self.length, self.mesh)
            return gathered
        return all_gather_slices(mask.to(torch.uint8), -1, self.length, self.mesh).to(mask.dtype)


def _cast_for_autocast(arguments: AttentionArguments) -> AttentionArguments:
    device_type = arguments.query.device.type
    if not torch.is_autocast_enabled(device_type):
        return arguments
    dtype = torch.get_autocast_dtype(device_type)
    return replace(
        arguments,
        query=arguments.query.to(dtype),
        key=arguments.key.to(dtype),
        value=arguments.value.to(dtype),
    )


def read_causal_mask(mask: Tensor, length: int) -> bool | None:
    """Return True for a causal mask, False for a mask that hides nothing, and None for any other."""
    if mask.requires_grad or mask.shape[-2:] != (length, length) or mask.numel() != length**2:
        return None
    mask = mask.view(length, length)
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if bool(visible.all()):
        return False
    return True if bool(((visible == causal) & (hidden == ~causal)).all()) else None

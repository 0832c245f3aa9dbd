"""Division of the weights over servers by bytes, in whole parameters and rows of large parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError


@dataclass(frozen=True, order=True)
class ParameterSlice:
    """Rows of a parameter, along its first dim. A scalar has one row."""

    name: str
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice of a tensor shaped like the parameter; it shares the tensor's memory."""
        return tensor[self.begin : self.end] if tensor.dim() else tensor


def assign_slices(params: Mapping[str, Tensor], num_servers: int, by_row: bool) -> list[list[ParameterSlice]]:
    """Return the slices of each server: the largest first, to the server with the fewest bytes.

    `by_row`: whether parameters may be split. Raises PlanError if there are fewer slices than servers.
    """
    rows = {name: len(tensor) if tensor.dim() else 1 for name, tensor in params.items()}
    bytes_ = {name: tensor.numel() * tensor.element_size() for name, tensor in params.items()}
    share = sum(bytes_.values()) / num_servers
    slices: list[tuple[float, ParameterSlice]] = []
    for name in params:
        parts = min(rows[name], -(-bytes_[name] // max(1, int(share)))) if by_row else 1
        ends = [rows[name] * part // max(1, parts) for part in range(max(1, parts) + 1)]
        slices += [
            (bytes_[name] * (end - begin) / max(1, rows[name]), ParameterSlice(name, begin, end))
            for begin, end in pairwise(ends)
        ]
    if len(slices) < num_servers:
        raise PlanError(
            f"servers={num_servers} requires {num_servers} slices of the weights, got {len(slices)}; "
            f"use servers={len(slices)} or fewer"
        )
    assigned: list[list[ParameterSlice]] = [[] for _ in range(num_servers)]
    load = [0.0] * num_servers
    for size, slice_ in sorted(slices, key=lambda item: (-item[0], item[1])):
        lightest = load.index(min(load))
        assigned[lightest].append(slice_)
        load[lightest] += size
    return assigned


def slice_state(
    optimizer: torch.optim.Optimizer, whole: nn.Parameter, slice_: ParameterSlice
) -> dict[str, Any]:
    """Return the optimizer's state of a slice.

    It has rows of tensors shaped like the parameter, and copies of the rest.
    """
    return {
        key: slice_.of(value).clone() if isinstance(value, Tensor) and value.shape == whole.shape else value
        for key, value in optimizer.state.get(whole, {}).items()
    }


def join_state(shape: torch.Size, parts: Mapping[ParameterSlice, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of all slices of a parameter: the reverse of `slice_state`."""
    ordered = [parts[slice_] for slice_ in sorted(parts)]
    shapes = [(slice_.end - slice_.begin, *shape[1:]) for slice_ in sorted(parts)]
    joined = {}
    for key, first in ordered[0].items():
        is_split = shape and all(
            tuple(part[key].shape) == part_shape for part, part_shape in zip(ordered, shapes, strict=True)
        )
        joined[key] = torch.cat([part[key] for part in ordered]) if is_split else first
    return joined

"""Weights dealt out over servers by bytes: whole parameters, and rows of those that are more than a server's share."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError


@dataclass(frozen=True, order=True)
class ParameterSlice:
    """Rows of a parameter, along its first dim. A scalar has one."""

    name: str
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that is shaped like the parameter; it shares its memory."""
        return tensor[self.begin : self.end] if tensor.dim() else tensor


def deal(params: Mapping[str, Tensor], servers: int, by_row: bool) -> list[list[ParameterSlice]]:
    """The pieces of each server: the largest first, to the server that has least. `by_row`: whether parameters may be split.

    Raises PlanError when there are not enough pieces for all.
    """
    rows = {name: len(tensor) if tensor.dim() else 1 for name, tensor in params.items()}
    bytes_ = {name: tensor.numel() * tensor.element_size() for name, tensor in params.items()}
    share = sum(bytes_.values()) / servers
    pieces: list[tuple[float, ParameterSlice]] = []
    for name in params:
        parts = min(rows[name], -(-bytes_[name] // max(1, int(share)))) if by_row else 1
        ends = [rows[name] * part // max(1, parts) for part in range(max(1, parts) + 1)]
        pieces += [
            (bytes_[name] * (end - begin) / max(1, rows[name]), ParameterSlice(name, begin, end))
            for begin, end in pairwise(ends)
        ]
    if len(pieces) < servers:
        raise PlanError(
            f"servers={servers}, but the weights are only {len(pieces)} pieces; use servers={len(pieces)} or fewer"
        )
    dealt: list[list[ParameterSlice]] = [[] for _ in range(servers)]
    load = [0.0] * servers
    for size, piece in sorted(pieces, key=lambda item: (-item[0], item[1])):
        lightest = load.index(min(load))
        dealt[lightest].append(piece)
        load[lightest] += size
    return dealt


def cut_state(optimizer: torch.optim.Optimizer, whole: nn.Parameter, piece: ParameterSlice) -> dict[str, Any]:
    """The optimizer's state of a piece: rows of what is shaped like the parameter, copies of the rest."""
    return {
        key: piece.of(value).clone() if isinstance(value, Tensor) and value.shape == whole.shape else value
        for key, value in optimizer.state.get(whole, {}).items()
    }


def join_state(shape: torch.Size, parts: Mapping[ParameterSlice, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The reverse of `cut_state`, of all pieces of one parameter."""
    ordered = [parts[piece] for piece in sorted(parts)]
    rows = [(piece.end - piece.begin, *shape[1:]) for piece in sorted(parts)]
    joined = {}
    for key, first in ordered[0].items():
        cut = shape and all(tuple(part[key].shape) == of for part, of in zip(ordered, rows, strict=True))
        joined[key] = torch.cat([part[key] for part in ordered]) if cut else first
    return joined

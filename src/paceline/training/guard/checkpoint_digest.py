"""Digests of whole weights that do not depend on how ranks divide them, for checkpoints.

They are computed from the weights in memory before a checkpoint is written, by other ranks than those that
write them, and again from the weights that a resume has loaded. So they cover the copy, the writer, the files
and the reader, also if the plan or the number of ranks changes.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.training.guard.digest import ODD, view_bits

PIECE = 2**20  # elements at a time


def can_digest(plan: ResolvedPlan) -> bool:
    """Return whether all ranks train the same weights."""
    return not plan.is_asynchronous


@torch.no_grad()
def digest_weights(
    model: nn.Module, plan: ResolvedPlan, rank: int, device: torch.device, elsewhere: Container[str] = ()
) -> dict[str, list[int]]:
    """Return by name the digest of each parameter and its bytes per element. A collective.

    A digest is the sum of all elements as integers, each times an odd number that depends on its position in
    the whole parameter, modulo 2^64. So the sums of shards add up.

    elsewhere: names of parameters that another pipeline stage counts.
    """
    names, place = dict(model.named_parameters()), plan.place(rank)
    sums = torch.zeros(len(names), dtype=torch.int64, device=device)
    for at, (name, parameter) in enumerate(names.items()):
        if is_materialized(parameter) and name not in elsewhere and _is_last_copy(parameter, plan, place):
            sums[at] = _sum_part(parameter)
    if plan.ranks_per_stage * plan.pp > 1:
        dist.all_reduce(sums)
    return {
        name: [value, parameter.element_size()]
        for (name, parameter), value in zip(names.items(), sums.tolist(), strict=True)
    }


def _is_last_copy(parameter: Tensor, plan: ResolvedPlan, place: MeshCoordinate) -> bool:
    """Return whether this rank is the last of its stage with its part of a parameter.

    The first ranks write most of what several hold.
    """
    sharded: Any = parameter
    axes: set[str] = set()
    if is_dtensor(parameter):
        named = zip(sharded.device_mesh.mesh_dim_names, sharded.placements, strict=True)
        axes = {axis for axis, placement in named if not placement.is_replicate()}
    num_data = plan.dp * plan.cp
    num_replicas = plan.replicate if plan.zero >= 2 else num_data
    num_shards = num_data // num_replicas
    replica, shard = divmod(place.dp * plan.cp + place.cp, num_shards)
    lasts = {
        "replicate": replica == num_replicas - 1,
        "shard": shard == num_shards - 1,
        "tp": place.tp == plan.tp - 1,
    }
    return all(is_last or axis in axes for axis, is_last in lasts.items())


def _sum_part(parameter: Tensor) -> Tensor:
    """Return the sum of the elements that this rank has, each times the factor of its position."""
    bits = view_bits(parameter)
    if not is_dtensor(parameter):
        return _sum_positions(bits, 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = parameter
    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    if not all(shape):
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    per_row = sharded.numel() // sharded.shape[0]
    if shape[1:] == sharded.shape[1:]:
        return _sum_positions(bits, offset[0] * per_row)
    return _sum_box(bits.view(shape[0], -1), sharded.shape, shape, offset)


def _sum_box(rows: Tensor, whole: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return the weighted sum of a part that has not all columns.

    rows: the elements, by their position in the first dimension. whole, shape, offset: of the whole tensor,
        and of the part in it.
    """
    within = torch.zeros(1, dtype=torch.int64, device=rows.device)
    for size, length, start in zip(whole[1:], shape[1:], offset[1:], strict=True):
        places = torch.arange(start, start + length, device=rows.device)
        within = (within[:, None] * size + places).reshape(-1)
    per_row = math.prod(whole[1:])
    total, step = torch.zeros((), dtype=torch.int64, device=rows.device), max(1, PIECE // len(within))
    for begin in range(0, len(rows), step):
        piece = rows[begin : begin + step].to(torch.int64)
        starts = torch.arange(offset[0] + begin, offset[0] + begin + len(piece), device=rows.device)
        places = starts[:, None] * per_row + within
        total += (piece * ((places * ODD) | 1)).sum()
    return total


def _sum_positions(bits: Tensor, start: int) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), PIECE):
        piece = bits[begin : begin + PIECE].to(torch.int64)
        places = torch.arange(start + begin, start + begin + piece.numel(), device=bits.device)
        total += (piece * ((places * ODD) | 1)).sum()
    return total


def find_difference(saved: Mapping[str, list[int]], loaded: Mapping[str, list[int]]) -> str | None:
    """Return the first parameter of equal type whose digest differs, or None."""
    return next(
        (
            name
            for name, (value, itemsize) in saved.items()
            if name in loaded and loaded[name][1] == itemsize and loaded[name][0] != value
        ),
        None,
    )

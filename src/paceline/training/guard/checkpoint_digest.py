"""Digests of whole weights that do not depend on how ranks divide them, for checkpoints.

They are computed from the weights in memory before a checkpoint is written, by other ranks than those that
write them, and again from the weights that a resume has loaded. So they cover the copy, the writer, the files
and the reader, also if the plan or the number of ranks changes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.dtensor import is_dtensor
from paceline.plan.plan import ResolvedPlan
from paceline.training.guard.digest import ODD, view_bits

PIECE = 2**20  # elements at a time


def can_digest(plan: ResolvedPlan) -> bool:
    """Return whether each weight is whole on each rank, or sharded along its first dimension only."""
    return plan.model_degree == 1 and not plan.is_asynchronous


@torch.no_grad()
def digest_weights(model: nn.Module, rank: int, ranks: int, device: torch.device) -> dict[str, list[int]]:
    """Return by name the digest of each parameter and its bytes per element. A collective.

    A digest is the sum of all elements as integers, each times an odd number that depends on its position in
    the whole parameter, modulo 2^64. So the sums of shards add up.
    """
    names = dict(model.named_parameters())
    sums = torch.zeros(len(names), dtype=torch.int64, device=device)
    for at, parameter in enumerate(names.values()):
        for start, bits in _find_own_part(parameter, rank, ranks):
            sums[at] += _sum_positions(bits, start)
    if ranks > 1:
        dist.all_reduce(sums)
    return {
        name: [value, parameter.element_size()]
        for (name, parameter), value in zip(names.items(), sums.tolist(), strict=True)
    }


def _find_own_part(parameter: Tensor, rank: int, ranks: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the part of a parameter that this rank counts: its first position, and its bits."""
    if not is_dtensor(parameter):
        if rank == ranks - 1:  # the first ranks write most of what all hold
            yield 0, view_bits(parameter)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    coordinate = mesh.get_coordinate()
    is_last_replica = all(
        at == size - 1
        for at, size, placement in zip(coordinate, mesh.shape, placements, strict=True)
        if placement.is_replicate()
    )
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, mesh, placements)
    if is_last_replica and all(shape):
        per_row = sharded.numel() // sharded.shape[0]
        yield offset[0] * per_row, view_bits(parameter)


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

"""Functions of whole matrices of which ranks have shards: each rank computes some of them for all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import is_dtensor, shard_size

# What is sharded along one axis: its process group and the dimension of the tensor.
Axis = tuple[dist.ProcessGroup, int]


def update_matrices(
    params: Sequence[Tensor], shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return this rank's shard of function(whole) for each tensor. A collective if any is sharded.

    params: distributed like the tensors. shards: the part of each tensor on this rank. Tensors sharded along
    one axis are dealt to the ranks of that axis, by size; others are gathered, and each rank computes them.
    """
    results: dict[int, Tensor] = {}
    dealt: dict[Axis, list[int]] = {}
    for at, (parameter, shard) in enumerate(zip(params, shards, strict=True)):
        axes = _sharded_axes(parameter)
        if not axes:
            results[at] = function(shard)
        elif len(axes) == 1 and axes[0][1] is not None:
            dealt.setdefault((axes[0][0], axes[0][1]), []).append(at)
        else:
            results[at] = _gather_and_cut(parameter, shard, function)
    for (group, dim), indices in dealt.items():
        parts = _deal(
            [params[at].shape for at in indices], [shards[at] for at in indices], group, dim, function
        )
        results |= dict(zip(indices, parts, strict=True))
    return [results[at] for at in range(len(params))]


def _sharded_axes(parameter: Any) -> list[tuple[dist.ProcessGroup, int | None]]:
    """Return process group and dimension of each axis that shards a parameter; None: not in equal parts."""
    if not is_dtensor(parameter):
        return []
    from torch.distributed.tensor import Shard

    return [
        (parameter.device_mesh.get_group(axis), placement.dim if type(placement) is Shard else None)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    ]


def _gather_and_cut(parameter: Any, shard: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    whole: Any = DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()
    local: Tensor = distribute_tensor(function(whole), mesh, placements, src_data_rank=None).to_local()
    return local


def _deal(
    shapes: Sequence[torch.Size],
    shards: Sequence[Tensor],
    group: dist.ProcessGroup,
    dim: int,
    function: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return this rank's shards of the results: shards go to the owner of a matrix, which returns theirs."""
    ranks, rank = group.size(), group.rank()
    owners = balance_by_size([shape.numel() * min(shape[0], shape[1:].numel()) for shape in shapes], ranks)
    owned = [at for at, owner in enumerate(owners) if owner == rank]
    by_owner = [[at for at, owner in enumerate(owners) if owner == other] for other in range(ranks)]
    parts = [[_part_shape(shapes[at], dim, ranks, other) for at in owned] for other in range(ranks)]
    received = _exchange(
        [[shards[at] for at in indices] for indices in by_owner],
        [sum(shape.numel() for shape in of_rank) for of_rank in parts],
        shards[0],
        group,
    )
    pieces = [_split(flat, of_rank) for flat, of_rank in zip(received, parts, strict=True)]
    results = [
        function(torch.cat([of_rank[position] for of_rank in pieces], dim)) for position in range(len(owned))
    ]
    cuts = [
        result.split([of_rank[position][dim] for of_rank in parts], dim)
        for position, result in enumerate(results)
    ]
    returned = _exchange(
        [[of_matrix[other] for of_matrix in cuts] for other in range(ranks)],
        [sum(shards[at].numel() for at in indices) for indices in by_owner],
        shards[0],
        group,
    )
    found: dict[int, Tensor] = {}
    for flat, indices in zip(returned, by_owner, strict=True):
        found |= dict(zip(indices, _split(flat, [shards[at].shape for at in indices]), strict=True))
    return [found[at] for at in range(len(shapes))]


def _part_shape(shape: torch.Size, dim: int, ranks: int, rank: int) -> torch.Size:
    """Return the shape of the shard of a rank."""
    length = shard_size(shape[dim], ranks)
    size = min(length, max(0, shape[dim] - length * rank))
    return torch.Size((*shape[:dim], size, *shape[dim + 1 :]))


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: list[int], like: Tensor, group: dist.ProcessGroup
) -> list[Tensor]:
    """Send a list of tensors to each rank, and return what each rank sent, flat. sizes: of these."""
    empty = like.new_empty(0)
    flats = [torch.cat([empty, *(tensor.flatten() for tensor in tensors)]) for tensors in sent]
    output = like.new_empty(sum(sizes))
    dist.all_to_all_single(output, torch.cat(flats), sizes, [flat.numel() for flat in flats], group=group)
    return list(output.split(sizes))


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

"""The slices of a sequence: which positions a rank has, and the collective that gathers them."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import PlanError
from paceline.torch_compat import reduce_scatter_single


@lru_cache(64)
def rank_positions(length: int, rank: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a sequence of `length` that `rank` has.

    If possible they are a chunk of its first half and the mirrored chunk of its second half, so that causal
    attention costs each rank the same. Otherwise they are a range, which is one shorter on the last ranks if
    `ranks` does not divide the length.
    """
    if length % (2 * ranks):
        return torch.arange(length, device=device).tensor_split(ranks)[rank]
    chunks = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def count_rank_positions(length: int, rank: int, ranks: int) -> int:
    """Return the number of positions of a sequence of `length` that `rank` has."""
    return length // ranks + (rank < length % ranks)


@lru_cache(64)
def _gathered_order(length: int, ranks: int, device: torch.device) -> Tensor:
    """Return where each position of a sequence is in the padded slices of all ranks, one after the other."""
    padded = count_rank_positions(length, 0, ranks)
    places = [
        rank * padded + torch.arange(count_rank_positions(length, rank, ranks), device=device)
        for rank in range(ranks)
    ]
    positions = torch.cat([rank_positions(length, rank, ranks, device) for rank in range(ranks)])
    return torch.cat(places).index_select(0, positions.argsort())


def all_gather_slices(local: Tensor, dim: int, length: int, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence along `dim`, from the slices of all ranks."""
    ranks = mesh.size()
    local = _pad(local, dim, count_rank_positions(length, 0, ranks)).contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=mesh.get_group())
    return torch.cat(parts, dim).index_select(dim, _gathered_order(length, ranks, local.device))


def reduce_scatter_slices(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks."""
    ranks, length = mesh.size(), whole.size(dim)
    padded = count_rank_positions(length, 0, ranks)
    parts = torch.stack(
        [
            _pad(whole.index_select(dim, rank_positions(length, rank, ranks, whole.device)), dim, padded)
            for rank in range(ranks)
        ]
    )
    # torch 2.13: gloo's reduce-scatter takes twice the time of an all-reduce
    if whole.device.type == "cpu":
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=mesh.get_group())
        part = received.sum(0)
    else:
        part = torch.empty_like(parts[0])
        reduce_scatter_single(part, parts, group=mesh.get_group())
    own = count_rank_positions(length, mesh.get_local_rank(), ranks)
    return part if own == padded else part.narrow(dim, 0, own)


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing, dims_after = size - tensor.size(dim), tensor.dim() - 1 - dim % tensor.dim()
    return F.pad(tensor, [0, 0] * dims_after + [0, missing]) if missing else tensor


def refuse_second_order() -> None:
    """Raise PlanError in a backward pass with create_graph=True, whose own derivatives would be wrong."""
    if torch.is_grad_enabled():
        raise PlanError(
            "the task differentiates gradients (create_graph=True), and cp computes only first derivatives "
            "of blocks on slices of the sequence; use a plan without cp"
        )


class GatherSlices(torch.autograd.Function):
    """Gather slices along `dim` for operations that each rank computes in the same way.

    All ranks have the same gradient. The backward pass multiplies its slice by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, length: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.ranks = dim, mesh.size()
        ctx.positions = rank_positions(length, mesh.get_local_rank(), ctx.ranks, local.device)
        return all_gather_slices(local, dim, length, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_order()
        return grad.index_select(ctx.dim, ctx.positions) * ctx.ranks, None, None, None


class GatherForSlices(torch.autograd.Function):
    """Gather slices along `dim` for operations that each rank computes for its own slice.

    Each rank has a part of the gradient. The backward pass adds the parts.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, length: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return all_gather_slices(local, dim, length, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_order()
        return reduce_scatter_slices(grad, ctx.dim, ctx.mesh), None, None, None

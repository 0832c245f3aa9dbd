"""The norm of the whole gradient, with each element counted on one rank."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import is_dtensor, is_first_replica, local_tensor
from paceline.plan.plan import MeshCoordinate, ResolvedPlan


def local_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the part of each gradient that this rank holds, without parameters that have no gradient.

    Of a sparse gradient, which must be coalesced, these are its rows.
    """
    grads = [grad for parameter in params if (grad := parameter.grad) is not None]
    shards = list(map(local_tensor, grads)) if any(map(is_dtensor, grads)) else grads
    return [grad._values() if grad.is_sparse else grad for grad in shards]


class GradientNorm:
    """The norm of the whole gradient, with each element counted on one rank.

    A shard is counted on the first rank that has a copy of it. A gradient that all ranks hold is counted on
    one rank, so that all ranks count about as many elements.

    torch's own function refuses gradients on different meshes, and runs a collective for each group.

    place: of this rank in the mesh.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], plan: ResolvedPlan, place: MeshCoordinate, device: torch.device
    ):
        self.params, self.device = params, device
        self.has_whole_gradient = plan.zero < 2 and not plan.splits_model  # on every rank
        owners = balance_by_size(
            [0 if is_dtensor(parameter) else parameter.numel() for parameter in params], plan.ranks_per_stage
        )
        self.counted = [
            parameter
            for parameter, owner in zip(params, owners, strict=True)
            if (
                is_first_replica(parameter, place)
                if is_dtensor(parameter)
                else owner == plan.index_in_stage(place)
            )
        ]

    def local_norms(self) -> list[Tensor]:
        """Return the norms of the tensors that this rank counts.

        Over all ranks, the sum of their squares is that of the whole norm.
        """
        return _tensor_norms(local_gradients(self.counted))

    def global_norm(self) -> Tensor:
        """Return the norm, the same on all ranks. A collective, unless every rank has the whole gradient."""
        if self.has_whole_gradient:
            return combine_norms(_tensor_norms(local_gradients(self.params)), self.device)
        squares = combine_norms(self.local_norms(), self.device).square()
        dist.all_reduce(squares)
        return squares.sqrt()


def _tensor_norms(grads: list[Tensor]) -> list[Tensor]:
    grads = [grad for grad in grads if grad.numel()]
    return list(torch._foreach_norm(grads)) if grads else []


def combine_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the norm of tensors with these norms, in float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64)


@torch.no_grad()
def scale_(params: Iterable[nn.Parameter], by: Tensor | float) -> None:
    """Multiply the gradients of `params` by a number."""
    grads = local_gradients(params)
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        same = [grad for grad in grads if grad.dtype == dtype]
        torch._foreach_mul_(same, by.to(dtype.to_real()) if isinstance(by, Tensor) else by)

"""Adaptive gradient clipping: gradients are limited relative to the norms of their weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.distributed.dtensor import local_tensor
from paceline.training.optimizers.whole_tensor import find_place, sum_shards

SMALLEST = 1e-3  # least norm of weights, as in the paper


class AdaptiveClipping:
    """Limits the gradient of each unit to `limit` times the norm of its weights. Call it after backward.

    Brock et al., High-performance large-scale image recognition without normalization, 2021. A unit is a row
    of a matrix, an output channel of a convolution, or a whole vector. A collective if weights are sharded.
    """

    def __init__(self, params: Sequence[nn.Parameter], limit: float):
        self.params, self.limit = params, limit

    @torch.no_grad()
    def __call__(self) -> None:
        """Clip the gradients."""
        params = [parameter for parameter in self.params if parameter.grad is not None]
        grads = [local_tensor(parameter.grad) for parameter in params if parameter.grad is not None]
        squares = [
            torch.cat(
                [_unit_squares(parameter, tensor) for tensor in (local_tensor(parameter.detach()), grad)]
            )
            for parameter, grad in zip(params, grads, strict=True)
        ]
        [sums] = sum_shards([params], [squares]) if params else [[]]
        for parameter, grad, of_units in zip(params, grads, sums, strict=True):
            weights, gradient = of_units.sqrt().view(2, -1)
            bound = self.limit * weights.clamp(min=SMALLEST)
            factors = torch.where(gradient > bound, bound / gradient, 1.0)
            if parameter.dim() >= 2:
                factors = factors[find_place(parameter)[0]].view(-1, *[1] * (parameter.dim() - 1))
            grad.mul_(factors.to(grad.dtype))


def _unit_squares(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return the sums of squares of all units, of which this rank may have some or a part of each.

    tensor: the parameter or its gradient; whole, or the part on this rank.
    """
    local = local_tensor(tensor)
    if parameter.dim() < 2:
        return local.double().square().sum().view(1)
    sums = torch.zeros(parameter.shape[0], dtype=torch.float64, device=local.device)
    if local.numel():
        sums[find_place(parameter)[0]] = local.flatten(1).double().square().sum(1)
    return sums

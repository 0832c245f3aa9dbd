"""Adafactor: Adam whose second moments of matrices are products of their row and column means."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.distributed.dtensor import is_dtensor
from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    WholeTensorOptimizer,
    find_place,
    squares,
)


class Adafactor(WholeTensorOptimizer):
    """Adaptive learning rates with sublinear memory cost (Shazeer, Stern, 2018, Algorithms 4 and 5).

    Tensors with two dimensions or more are factored along their last two. Each rank holds the means of whole
    rows and columns. The defaults, and ε₁ of 2⁻⁵² in float64, are those of torch.

    relative_step: the learning rate is at most 1/√step. scale_parameter: it is multiplied by the root mean
    square of the weights, at least eps2. clip_threshold: largest root mean square of an update.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta2_decay: float = -0.8,
        eps2: float = 1e-3,
        clip_threshold: float = 1.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps2": eps2,
                "clip_threshold": clip_threshold,
                "scale_parameter": scale_parameter,
                "relative_step": relative_step,
                "weight_decay": weight_decay,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, lr = tensors.options, tensors.options["lr"]
        steps = tensors.count_steps()
        places = [find_place(parameter) for parameter in tensors.params]
        of_weights = squares(tensors.weights)
        sums = yield [
            torch.cat([square, *_row_and_column_sums(parameter, grad, place)])
            for square, parameter, grad, place in zip(
                of_weights, tensors.params, tensors.grads, places, strict=True
            )
        ]
        updates = []
        for at, (parameter, grad, step) in enumerate(zip(tensors.params, tensors.grads, steps, strict=True)):
            rate = step ** options["beta2_decay"]
            variance = self._variance(parameter, grad, sums[at][1:], places[at], rate)
            tiny = torch.finfo(grad.dtype).eps ** 2
            updates.append(variance.clamp_(min=tiny).rsqrt_().mul_(grad))
        of_updates = yield squares(updates)
        for at, (weight, parameter, step) in enumerate(
            zip(tensors.weights, tensors.params, steps, strict=True)
        ):
            size = max(1, parameter.numel())
            scale: Any = min(lr, 1 / math.sqrt(step)) if options["relative_step"] else lr
            if options["scale_parameter"]:
                scale = scale * (sums[at][0] / size).sqrt().clamp(min=options["eps2"])
            scale = scale / ((of_updates[at][0] / size).sqrt() / options["clip_threshold"]).clamp(min=1.0)
            if options["weight_decay"]:
                weight.mul_(1 - lr * options["weight_decay"])
            weight.sub_(updates[at].mul_(scale.to(weight.dtype)))

    def _variance(
        self, parameter: Tensor, grad: Tensor, sums: Tensor, place: tuple[slice, ...], rate: float
    ) -> Tensor:
        """Update the second moment of a tensor, and return its part on this rank.

        sums: of squares of the whole gradient, by row and by column.
        """
        state = self.state[parameter]
        if parameter.dim() < 2:
            if "variance" not in state:
                state["variance"] = torch.zeros_like(parameter, requires_grad=False)
            local = state["variance"].to_local() if is_dtensor(parameter) else state["variance"]
            result: Tensor = local.lerp_(grad.square(), rate).clone()
            return result
        rows, columns = _factor_shapes(parameter)
        for key, shape, part, count in (
            ("row_var", rows, sums[: rows.numel()], parameter.shape[-1]),
            ("col_var", columns, sums[rows.numel() :], parameter.shape[-2]),
        ):
            mean = (part / count).view(shape).to(grad.dtype)
            state[key] = state.get(key, torch.zeros_like(mean)).to(mean.device).lerp_(mean, rate)
        row, column = state["row_var"], state["col_var"]
        row = row / row.mean(-1, keepdim=True).clamp(min=torch.finfo(grad.dtype).eps)
        *outer, row_slice, column_slice = place
        return row[(*outer, row_slice)].unsqueeze(-1) * column[(*outer, column_slice)].unsqueeze(-2)


def _factor_shapes(parameter: Tensor) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of the means of rows and of columns."""
    return parameter.shape[:-1], torch.Size((*parameter.shape[:-2], parameter.shape[-1]))


def _row_and_column_sums(parameter: Tensor, grad: Tensor, place: tuple[slice, ...]) -> list[Tensor]:
    """Return the sums of squares of rows and columns of the part on this rank; 0 for others."""
    if parameter.dim() < 2:
        return []
    found = []
    *outer, rows, columns = place
    for shape, dim, along in zip(_factor_shapes(parameter), (-1, -2), (rows, columns), strict=True):
        sums = torch.zeros(shape, dtype=torch.float64, device=grad.device)
        if grad.numel():
            sums[(*outer, along)] = grad.square().sum(dim, dtype=torch.float64)
        found.append(sums.flatten())
    return found

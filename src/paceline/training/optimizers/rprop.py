"""Rprop on the shards of a rank."""

from typing import Any

import torch

from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class Rprop(WholeTensorOptimizer):
    """Resilient propagation (Riedmiller, Braun, 1993), the same updates as torch's.

    torch 2.13: its Rprop assigns to indices of the gradient, which DTensor does not support.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
    ):
        super().__init__(params, {"lr": lr, "etas": etas, "step_sizes": step_sizes})

    def _update(self, tensors: GroupTensors) -> Rounds:
        shrink, grow = tensors.options["etas"]
        smallest, largest = tensors.options["step_sizes"]
        steps = tensors.count_steps()
        before, sizes = tensors.moments("prev"), tensors.moments("step_size")
        for weight, grad, last, size, step in zip(
            tensors.weights, tensors.grads, before, sizes, steps, strict=True
        ):
            if step == 1:
                size.fill_(tensors.options["lr"])
            sign = grad * last
            factors = torch.ones_like(size).masked_fill_(sign > 0, grow).masked_fill_(sign < 0, shrink)
            size.mul_(factors).clamp_(smallest, largest)
            kept = grad.masked_fill(sign < 0, 0.0)
            weight.sub_(kept.sign() * size)
            last.copy_(kept)
        yield from ()

"""Lion: the sign of a momentum, with decoupled weight decay."""

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.compiled import approach_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class Lion(WholeTensorOptimizer):
    """Evolved sign momentum (Chen et al., Symbolic discovery of optimization algorithms, 2023, Program 1)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        lr, kept = options["lr"], 1 - options["lr"] * options["weight_decay"]
        scratch = Scratch()
        for _, piece in iterate_pieces(
            tensors.weights, tensors.grads, tensors.moments("exp_avg"), whole_from=self.whole_from
        ):
            if self._update_compiled(update_lion, piece, lr, kept, 1 - beta1, 1 - beta2):
                continue
            weights, grads, momenta = piece
            updates = scratch.lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            if options["weight_decay"]:
                torch._foreach_mul_(weights, kept)
            torch._foreach_add_(weights, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
        yield from ()


def update_lion(weights: Tensor, grads: Tensor, momenta: Tensor, numbers: Tensor) -> None:
    """Update a tensor. numbers: learning rate, factor of the decay, 1 - β₁, 1 - β₂. To be compiled."""
    lr, kept, rate1, rate2 = numbers.unbind()
    weights.mul_(kept).sub_(lr * torch.sign(momenta + rate1 * (grads - momenta)))
    approach_(momenta, grads, rate2)

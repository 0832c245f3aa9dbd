"""Adamax on a CPU, in pieces that fit into the cache."""

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.compiled import approach_
from paceline.training.optimizers.elementwise import apply_decay
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class Adamax(WholeTensorOptimizer):
    """Adam with the largest gradient (Kingma, Ba, 2014, Algorithm 2), the same updates as torch's."""

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        steps = tensors.count_steps()
        decayed, copies = Scratch(), Scratch()
        moments = tensors.moments("exp_avg"), tensors.moments("exp_inf")
        for at, piece in iterate_pieces(
            tensors.weights, tensors.grads, *moments, keys=steps, whole_from=self.whole_from
        ):
            lr = options["lr"] / (1 - beta1 ** steps[at[0]])
            numbers = lr, options["weight_decay"], 1 - beta1, beta2, options["eps"]
            if self._update_compiled(update_adamax, piece, *numbers):
                continue
            weights, grads, firsts, largest = piece
            grads = apply_decay(weights, grads, options, decayed)
            torch._foreach_lerp_(firsts, grads, 1 - beta1)
            sizes = copies.copy(grads)
            torch._foreach_abs_(sizes)
            torch._foreach_add_(sizes, options["eps"])
            torch._foreach_mul_(largest, beta2)
            torch._foreach_maximum_(largest, sizes)
            torch._foreach_addcdiv_(weights, firsts, largest, -lr)
        yield from ()


def update_adamax(weights: Tensor, grads: Tensor, firsts: Tensor, largest: Tensor, numbers: Tensor) -> None:
    """Update a tensor. numbers: learning rate with bias correction, decay, 1 - β₁, β₂, ε. To be compiled."""
    lr, decay, rate1, beta2, eps = numbers.unbind()
    grads = grads + decay * weights
    approach_(firsts, grads, rate1)
    largest.copy_(torch.maximum(beta2 * largest, grads.abs() + eps))
    weights.sub_(lr * firsts / largest)

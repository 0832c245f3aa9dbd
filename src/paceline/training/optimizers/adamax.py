"""Adamax on a CPU, in pieces that fit into the cache."""

from typing import Any

import torch

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
        for at, (weights, grads, firsts, largest) in iterate_pieces(
            tensors.weights, tensors.grads, tensors.moments("exp_avg"), tensors.moments("exp_inf"), keys=steps
        ):
            grads = apply_decay(weights, grads, options, decayed)
            torch._foreach_lerp_(firsts, grads, 1 - beta1)
            sizes = copies.copy(grads)
            torch._foreach_abs_(sizes)
            torch._foreach_add_(sizes, options["eps"])
            torch._foreach_mul_(largest, beta2)
            torch._foreach_maximum_(largest, sizes)
            lr = options["lr"] / (1 - beta1 ** steps[at[0]])
            torch._foreach_addcdiv_(weights, firsts, largest, -lr)
        yield from ()

"""Adadelta on a CPU, in pieces that fit into the cache."""

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.compiled import approach_
from paceline.training.optimizers.elementwise import apply_decay
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class Adadelta(WholeTensorOptimizer):
    """Updates as large as their mean so far (Zeiler, 2012, Algorithm 1), the same as torch's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay})

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, rho = tensors.options, tensors.options["rho"]
        tensors.count_steps()
        decayed, numerators, denominators = Scratch(), Scratch(), Scratch()
        moments = tensors.moments("square_avg"), tensors.moments("acc_delta")
        numbers = options["lr"], options["weight_decay"], 1 - rho, options["eps"]
        for _, piece in iterate_pieces(tensors.weights, tensors.grads, *moments, whole_from=self.whole_from):
            if self._update_compiled(update_adadelta, piece, *numbers):
                continue
            weights, grads, squares, deltas = piece
            grads = apply_decay(weights, grads, options, decayed)
            torch._foreach_mul_(squares, rho)
            torch._foreach_addcmul_(squares, grads, grads, 1 - rho)
            updates, divisors = numerators.copy(deltas), denominators.copy(squares)
            torch._foreach_add_(updates, options["eps"])
            torch._foreach_add_(divisors, options["eps"])
            torch._foreach_div_(updates, divisors)
            torch._foreach_sqrt_(updates)
            torch._foreach_mul_(updates, grads)
            torch._foreach_mul_(deltas, rho)
            torch._foreach_addcmul_(deltas, updates, updates, 1 - rho)
            torch._foreach_add_(weights, updates, alpha=-options["lr"])
        yield from ()


def update_adadelta(weights: Tensor, grads: Tensor, squares: Tensor, deltas: Tensor, numbers: Tensor) -> None:
    """Update a tensor. numbers: learning rate, weight decay, 1 - rho, eps. To be compiled."""
    lr, decay, rate, eps = numbers.unbind()
    grads = grads + decay * weights
    approach_(squares, grads.square(), rate)
    updates = torch.sqrt((deltas + eps) / (squares + eps)) * grads
    approach_(deltas, updates.square(), rate)
    weights.sub_(lr * updates)

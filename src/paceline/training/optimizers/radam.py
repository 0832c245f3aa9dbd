"""RAdam on a CPU, by the fused kernel of Adam."""

import math
from typing import Any

import torch

from paceline.training.optimizers.elementwise import apply_decay, subtract_adam_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer

MIN_LENGTH = 5.0  # of the average of squares, in steps, from which the update divides by it


class RAdam(WholeTensorOptimizer):
    """Rectified Adam (Liu et al., 2019), the same updates as torch's.

    Adam with another learning rate; in the first steps, momentum alone.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        fused: bool = True,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "fused": fused,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        steps, decayed = tensors.count_steps(), Scratch()
        moments = tensors.moments("exp_avg"), tensors.moments("exp_avg_sq")
        for at, (weights, grads, firsts, seconds) in iterate_pieces(
            tensors.weights,
            tensors.grads,
            *moments,
            keys=steps,
            is_divided=False,
        ):
            step = steps[at[0]]
            grads = apply_decay(weights, grads, options, decayed)
            lr = options["lr"] / (1 - beta1**step)
            rectification = _rectify(beta2, step)
            if rectification is not None:
                lr *= rectification * math.sqrt(1 - beta2**step)
                subtract_adam_(
                    weights,
                    grads,
                    firsts,
                    seconds,
                    lr=lr,
                    betas=options["betas"],
                    eps=options["eps"],
                    is_fused=options["fused"],
                )
                continue
            torch._foreach_lerp_(firsts, grads, 1 - beta1)
            torch._foreach_mul_(seconds, beta2)
            torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
            torch._foreach_add_(weights, firsts, alpha=-lr)
        yield from ()


def _rectify(beta2: float, step: int) -> float | None:
    """Return the factor on the adaptive learning rate; None in the first steps, which have none."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    if length <= MIN_LENGTH:
        return None
    variance = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return math.sqrt(variance)

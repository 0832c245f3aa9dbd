"""LAMB: Adam with decoupled weight decay, whose step follows the norm of each tensor."""

import math
from typing import Any

import torch

from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    WholeTensorOptimizer,
    correction,
    squares,
    subtract_,
    trust_ratios,
)


class Lamb(WholeTensorOptimizer):
    """Layer-wise adaptive moments (You et al., Large batch optimization for deep learning, 2020, Alg. 2).

    The trust ratio ‖w‖ / ‖r + λw‖ of each tensor scales its update r + λw, where r is that of Adam.

    convention: "you2020" adapts every tensor; "timm", as timm and apex do, has a ratio of 1 where λ = 0.
    bias_correction: of both moments of Adam; the first version of the paper has none. trust: whether the
    ratio applies; without it, it is 1. trust_clip: the largest ratio.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        trust_clip: float | None = None,
        convention: str = "you2020",
        trust: bool = True,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "trust_clip": trust_clip,
                "convention": convention,
                "trust": trust,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        decay = options["weight_decay"]
        firsts, seconds = list(tensors.moments("exp_avg")), list(tensors.moments("exp_avg_sq"))
        steps = tensors.count_steps()
        torch._foreach_lerp_(firsts, tensors.grads, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, tensors.grads, tensors.grads, 1 - beta2)
        roots = torch._foreach_sqrt(seconds)
        if options["bias_correction"]:
            torch._foreach_div_(roots, [math.sqrt(bias) for bias in correction(beta2, steps)])
        torch._foreach_add_(roots, options["eps"])
        updates = torch._foreach_div(firsts, roots)
        if options["bias_correction"]:
            torch._foreach_div_(updates, correction(beta1, steps))
        if decay:
            torch._foreach_add_(updates, tensors.weights, alpha=decay)
        norms = torch.stack((yield squares(tensors.weights, updates))).sqrt()
        ratios = trust_ratios(norms[:, 0], norms[:, 1], options["trust_clip"])
        if not options["trust"] or (options["convention"] == "timm" and not decay):
            ratios = torch.ones_like(ratios)
        subtract_(tensors.weights, list(updates), ratios, options["lr"])

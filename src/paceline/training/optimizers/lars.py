"""LARS: SGD with momentum whose learning rate follows the norms of each tensor."""

from typing import Any

import torch

from paceline.training.optimizers.elementwise import apply_momentum_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    WholeTensorOptimizer,
    squares,
    trust_ratios,
)


class Lars(WholeTensorOptimizer):
    """Layer-wise adaptive rates (You et al., Large batch training of convolutional networks, 2017).

    The trust ratio η‖w‖ / (‖g‖ + λ‖w‖ + ε) of each tensor scales its gradient with weight decay, g + λw.

    convention: "you2017" multiplies by the learning rate before the momentum, as in Algorithm 1 of the paper;
    "timm" after it, as timm and torch's SGD do, and has a ratio of 1 where λ = 0. trust: whether the ratio
    applies; without it, it is 1. trust_clip: the largest ratio.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        trust_clip: float | None = None,
        convention: str = "you2017",
        trust: bool = True,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "eps": eps,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "trust_clip": trust_clip,
                "convention": convention,
                "trust": trust,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, weights = tensors.options, tensors.weights
        decay, momentum, lr = options["weight_decay"], options["momentum"], options["lr"]
        ratios = torch.ones(len(weights), dtype=torch.float64, device=weights[0].device)
        if options["trust"] and (decay > 0 or options["convention"] == "you2017"):
            of_weights, of_grads = torch.stack((yield squares(weights, tensors.grads))).sqrt().unbind(1)
            bound = of_grads + decay * of_weights + options["eps"]
            ratios = trust_ratios(
                options["trust_coefficient"] * of_weights, bound * (of_grads > 0), options["trust_clip"]
            )
        before, after = (lr, 1.0) if options["convention"] == "you2017" else (1.0, lr)
        moments = [tensors.moments("momentum_buffer")] if momentum else []
        if not options["nesterov"] and apply_momentum_(
            weights,
            tensors.grads,
            moments[0] if momentum else None,
            scales=ratios * before,
            decays=torch.full_like(ratios, decay),
            momentum=momentum,
            lr=after,
        ):
            return
        scales = [scale.to(weight.dtype) for scale, weight in zip(ratios * before, weights, strict=True)]
        scratch = Scratch()
        for at, (parts, grads, *velocities) in iterate_pieces(weights, tensors.grads, *moments):
            of_parts = [scales[index] for index in at]
            updates = scratch.copy(grads)
            if decay:
                torch._foreach_add_(updates, parts, alpha=decay)
            torch._foreach_mul_(updates, of_parts)
            if momentum:
                torch._foreach_mul_(velocities[0], momentum)
                torch._foreach_add_(velocities[0], updates)
                if options["nesterov"]:
                    torch._foreach_add_(updates, velocities[0], alpha=momentum)
                else:
                    updates = velocities[0]
            torch._foreach_add_(parts, updates, alpha=-after)

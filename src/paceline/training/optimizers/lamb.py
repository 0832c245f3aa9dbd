"""LAMB: Adam with decoupled weight decay, whose step follows the norm of each tensor."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from paceline.training.optimizers.compiled import approach_
from paceline.training.optimizers.elementwise import subtract_adam_
from paceline.training.optimizers.pieces import iterate_pieces, multiply_into
from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    WholeTensorOptimizer,
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
        options = tensors.options
        decay = options["weight_decay"]
        is_adapted = options["trust"] and (options["convention"] != "timm" or decay)
        moments, steps = (tensors.moments("exp_avg"), tensors.moments("exp_avg_sq")), tensors.count_steps()
        updates, (beta1, beta2) = self._memory_of_updates(tensors), options["betas"]
        for at, piece in iterate_pieces(
            tensors.weights, tensors.grads, *moments, updates, keys=steps, whole_from=self.whole_from
        ):
            step = steps[at[0]] if options["bias_correction"] else math.inf
            root = math.sqrt(1 - beta2**step)
            numbers = decay, 1 - beta1, 1 - beta2, 1 - beta1**step, 1 / root, options["eps"]
            if self._update_compiled(update_lamb, piece, *numbers):
                continue
            weights, grads, firsts, seconds, parts = piece
            multiply_into(parts, weights, decay)
            subtract_adam_(
                parts, grads, firsts, seconds, lr=-1.0, betas=options["betas"], eps=options["eps"], step=step
            )
        ratios = torch.ones(len(steps), dtype=torch.float64, device=tensors.weights[0].device)
        if is_adapted:
            totals = torch.stack((yield squares(tensors.weights, updates)))
            of_weights, of_updates = totals.sqrt().unbind(1)
            ratios = trust_ratios(of_weights, of_updates, options["trust_clip"])
        subtract_(tensors.weights, updates, options["lr"] * ratios)

    def _memory_of_updates(self, tensors: GroupTensors) -> list[Tensor]:
        """Return tensors like the weights. A CPU keeps them for the next step.

        New memory for all updates would cost more there than their computation.
        """
        kept: dict[nn.Parameter, Tensor] = vars(self).setdefault("_memory", {})
        found = []
        for parameter, weight in zip(tensors.params, tensors.weights, strict=True):
            memory = kept.get(parameter)
            if memory is None or _kind(memory) != _kind(weight):
                memory = torch.empty_like(weight)
            if weight.device.type == "cpu":
                kept[parameter] = memory
            found.append(memory)
        return found


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def update_lamb(
    weights: Tensor, grads: Tensor, firsts: Tensor, seconds: Tensor, updates: Tensor, numbers: Tensor
) -> None:
    """Compute the updates and moments of a tensor. To be compiled.

    numbers: weight decay, 1 - β₁, 1 - β₂, 1 - β₁ᵗ, 1 / √(1 - β₂ᵗ), ε.
    """
    decay, rate1, rate2, correction, factor, eps = numbers.unbind()
    approach_(firsts, grads, rate1)
    approach_(seconds, grads.square(), rate2)
    updates.copy_(firsts / (correction * (torch.sqrt(seconds) * factor + eps)) + decay * weights)

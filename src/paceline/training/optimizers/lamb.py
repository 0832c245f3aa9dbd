"""LAMB: Adam with decoupled weight decay, whose step follows the norm of each tensor."""

import math
from typing import Any

import torch

from paceline.training.optimizers.elementwise import subtract_adam_
from paceline.training.optimizers.pieces import Piece, Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    SquareSums,
    WholeTensorOptimizer,
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
        updates_of_pieces: list[Piece] = []
        sums = SquareSums(tensors.weights, 2)
        # Kept until the next step. New memory for all updates would cost more than their computation.
        memory: list[Scratch] = vars(self).setdefault("_memory", {}).setdefault(tensors.params[0], [])
        pieces = iterate_pieces(tensors.weights, tensors.grads, *moments, keys=steps)
        for number, (at, (weights, grads, firsts, seconds)) in enumerate(pieces):
            if number == len(memory):
                memory.append(Scratch())
            updates = memory[number].multiply(weights, decay)
            subtract_adam_(
                updates,
                grads,
                firsts,
                seconds,
                lr=-1.0,
                betas=options["betas"],
                eps=options["eps"],
                step=steps[at[0]] if options["bias_correction"] else math.inf,
            )
            updates_of_pieces.append((at, [weights, updates]))
            if is_adapted:
                sums.add(at, weights, updates)
        ratios = torch.ones(len(steps), dtype=torch.float64, device=tensors.weights[0].device)
        if is_adapted:
            totals = torch.stack((yield sums.by_tensor()))
            of_weights, of_updates = totals.sqrt().unbind(1)
            ratios = trust_ratios(of_weights, of_updates, options["trust_clip"])
        subtract_(updates_of_pieces, options["lr"] * ratios)

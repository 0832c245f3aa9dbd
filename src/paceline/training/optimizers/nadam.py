"""NAdam on a CPU, in pieces that fit into the cache."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.compiled import approach_
from paceline.training.optimizers.elementwise import apply_decay, subtract_adam_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class NAdam(WholeTensorOptimizer):
    """Adam with Nesterov's momentum (Dozat, 2016), the same updates as torch's."""

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
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
                "momentum_decay": momentum_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "fused": fused,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        steps = tensors.count_steps()
        decayed = Scratch()
        products = []
        for state, step in zip(tensors.states, steps, strict=True):
            state["mu_product"] = state.get("mu_product", torch.ones(())) * _momentum(options, step)
            products.append(float(state["mu_product"]))
        moments = tensors.moments("exp_avg"), tensors.moments("exp_avg_sq")
        keys = list(zip(steps, products, strict=True))
        lr, decay = options["lr"], options["weight_decay"]
        kept = 1 - lr * decay if options["decoupled_weight_decay"] else 1.0
        coupled = 0.0 if options["decoupled_weight_decay"] else decay
        for at, piece in iterate_pieces(
            tensors.weights, tensors.grads, *moments, keys=keys, whole_from=self.whole_from
        ):
            step, product = keys[at[0]]
            # The numerator of the update is a·g + b·m, where m = β₁·m₀ + (1 − β₁)·g is the new first moment.
            # That is (a + b)·(β·m₀ + (1 − β)·g): Adam's with another β, and without its bias correction.
            # The first moment is between that of Adam and g.
            mu, next_mu = _momentum(options, step), _momentum(options, step + 1)
            of_grads, of_firsts = (1 - mu) / (1 - product), next_mu / (1 - product * next_mu)
            numbers = kept, coupled, 1 - beta1, 1 - beta2, lr * of_grads, lr * of_firsts
            factor = 1 / math.sqrt(1 - beta2**step)
            if self._update_compiled(update_nadam, piece, *numbers, factor, options["eps"]):
                continue
            weights, grads, firsts, seconds = piece
            grads = apply_decay(weights, grads, options, decayed)
            total = of_grads + of_firsts
            beta = of_firsts * beta1 / total
            subtract_adam_(
                weights,
                grads,
                firsts,
                seconds,
                lr=lr * total * (1 - beta**step),
                betas=(beta, beta2),
                eps=options["eps"],
                step=step,
                is_fused=options["fused"],
            )
            if beta:
                torch._foreach_lerp_(firsts, grads, 1 - beta1 / beta)
        yield from ()


def update_nadam(weights: Tensor, grads: Tensor, firsts: Tensor, seconds: Tensor, numbers: Tensor) -> None:
    """Update a tensor. To be compiled.

    numbers: factor of a decoupled decay, weight decay, 1 - β₁, 1 - β₂, learning rates of the gradient and of
    the first moment, 1 / √(1 - β₂ᵗ), ε.
    """
    kept, decay, rate1, rate2, of_grads, of_firsts, factor, eps = numbers.unbind()
    grads = grads + decay * weights
    approach_(firsts, grads, rate1)
    approach_(seconds, grads.square(), rate2)
    updates = (of_grads * grads + of_firsts * firsts) / (torch.sqrt(seconds) * factor + eps)
    weights.mul_(kept).sub_(updates)


def _momentum(options: dict[str, Any], step: int) -> float:
    """Return µ of a step, which rises from half of β₁ to β₁."""
    beta1, decay = options["betas"][0], options["momentum_decay"]
    return float(beta1 * (1 - 0.5 * 0.96 ** (step * decay)))

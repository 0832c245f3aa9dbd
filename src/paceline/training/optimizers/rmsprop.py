"""RMSprop on a CPU, in pieces that fit into the cache."""

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.elementwise import apply_decay, subtract_adam_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer


class RMSprop(WholeTensorOptimizer):
    """Gradients divided by the root of their mean square (Hinton, 2012), the same updates as torch's.

    Without centering, this is Adam's update with β₁ = 0 and no bias correction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        fused: bool = True,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "fused": fused,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options = tensors.options
        tensors.count_steps()
        scratch, deviations = Scratch(), Scratch()
        names = ["square_avg"]
        names += ["momentum_buffer"] if options["momentum"] else []
        names += ["grad_avg"] if options["centered"] else []
        lists = [tensors.moments(name) for name in names]
        is_kernel = options["fused"] and len(lists) == 1 and not options["weight_decay"]
        for _, (weights, grads, *moments) in iterate_pieces(
            tensors.weights, tensors.grads, *lists, is_divided=not is_kernel
        ):
            by_name = dict(zip(names, moments, strict=True))
            updates = apply_decay(weights, grads, options, scratch)
            velocities = by_name.get("momentum_buffer")
            targets, lr = (weights, options["lr"]) if velocities is None else (velocities, -1.0)
            if velocities is not None:
                torch._foreach_mul_(velocities, options["momentum"])
            if options["centered"]:
                _average_(by_name["square_avg"], by_name["grad_avg"], updates, options["alpha"])
                roots = deviations.copy(by_name["square_avg"])
                torch._foreach_addcmul_(roots, by_name["grad_avg"], by_name["grad_avg"], -1)
                torch._foreach_sqrt_(roots)
                torch._foreach_add_(roots, options["eps"])
                torch._foreach_addcdiv_(targets, updates, roots, -lr)
            else:
                subtract_adam_(
                    targets,
                    updates,
                    updates,  # as first moments, which the kernel does not change, because β₁ is 0
                    by_name["square_avg"],
                    lr=lr,
                    betas=(0.0, options["alpha"]),
                    eps=options["eps"],
                    is_fused=options["fused"],
                )
            if velocities is not None:
                torch._foreach_add_(weights, velocities, alpha=-options["lr"])
        yield from ()


def _average_(squares: list[Tensor], means: list[Tensor], grads: list[Tensor], alpha: float) -> None:
    """Update the running means of the squares of gradients and of the gradients."""
    torch._foreach_mul_(squares, alpha)
    torch._foreach_addcmul_(squares, grads, grads, 1 - alpha)
    torch._foreach_lerp_(means, grads, 1 - alpha)

"""NovoGrad: gradients divided by the running norm of their tensor."""

from typing import Any

import torch

from paceline.training.optimizers.elementwise import apply_momentum_
from paceline.training.optimizers.pieces import Scratch, iterate_pieces
from paceline.training.optimizers.whole_tensor import (
    GroupTensors,
    Rounds,
    WholeTensorOptimizer,
    squares,
)


class NovoGrad(WholeTensorOptimizer):
    """Stochastic gradient descent with layer-wise moments (Ginsburg et al., 2019, Algorithm 1).

    The second moment is one number for each tensor, the running average of ‖g‖², which starts at its first
    value. The first moment adds g/(√v + ε) + λw.

    grad_averaging: adds (1 − β₁) times that instead, as an option of NVIDIA's code does.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options, (beta1, beta2) = tensors.options, tensors.options["betas"]
        firsts, steps = tensors.moments("exp_avg"), tensors.count_steps()
        seconds = tensors.whole("grad_norm_sq", lambda parameter: torch.zeros((), dtype=parameter.real.dtype))
        new = torch.cat((yield squares(tensors.grads)))
        starts = torch.tensor([step == 1 for step in steps], device=new.device)
        averages = torch.where(starts, new, torch.stack(seconds) * beta2 + new * (1 - beta2))
        for second, value in zip(seconds, averages, strict=True):
            second.copy_(value)
        scales = 1 / (averages.sqrt() + options["eps"])
        share = 1 - beta1 if options["grad_averaging"] else 1.0  # of the new term in the first moment
        if apply_momentum_(
            tensors.weights,
            tensors.grads,
            firsts,
            scales=share * scales,
            decays=options["weight_decay"] / scales,
            momentum=beta1,
            lr=options["lr"],
        ):
            return
        factors = [scale.to(grad.dtype) for scale, grad in zip(scales, tensors.grads, strict=True)]
        scratch = Scratch()
        for at, (weights, grads, momenta) in iterate_pieces(tensors.weights, tensors.grads, firsts):
            updates = scratch.copy(grads)
            torch._foreach_mul_(updates, [factors[index] for index in at])
            if options["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=options["weight_decay"])
            torch._foreach_mul_(momenta, beta1)
            torch._foreach_add_(momenta, updates, alpha=share)
            torch._foreach_add_(weights, momenta, alpha=-options["lr"])

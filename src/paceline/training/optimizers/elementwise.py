"""Operations on parts of tensors that element-wise optimizers share."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.pieces import Scratch


def apply_decay(
    weights: list[Tensor], grads: list[Tensor], options: Mapping[str, Any], scratch: Scratch
) -> list[Tensor]:
    """Return the gradients with weight decay; a decoupled one shrinks the weights instead.

    scratch: of the returned gradients.
    """
    decay = options["weight_decay"]
    if not decay:
        return grads
    if options.get("decoupled_weight_decay"):
        torch._foreach_mul_(weights, 1 - options["lr"] * decay)
        return grads
    decayed = scratch.copy(grads)
    torch._foreach_add_(decayed, weights, alpha=decay)
    return decayed


def subtract_adam_(
    targets: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: float = math.inf,
    is_fused: bool = True,
) -> None:
    """Update both moments of Adam, and subtract lr × first / (√second + eps) from the targets.

    step: of the bias correction; infinite: none. is_fused: whether a CPU uses torch's kernel, which reads
    and writes each tensor once. grads and firsts may be the same tensors.
    """
    beta1, beta2 = betas
    if is_fused and beta2 < 1 and all(map(_suits_kernel, (*targets, *grads, *firsts, *seconds))):
        count = torch.tensor(step, dtype=torch.float32)
        torch._fused_adam_(
            targets,
            grads,
            firsts,
            seconds,
            [],
            [count] * len(targets),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        return
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(targets, firsts, roots, -lr / (1 - beta1**step))


def _suits_kernel(tensor: Tensor) -> bool:
    """Return whether torch's fused kernel for CPUs, which ignores strides, updates a tensor correctly."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()

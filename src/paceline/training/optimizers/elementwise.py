"""Operations on parts of tensors that element-wise optimizers share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.data.fake import is_fake
from paceline.training.optimizers.pieces import Scratch, iterate_pieces

SMALLEST_SCALE = 1e-8


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


def apply_momentum_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    *,
    scales: Tensor,
    decays: Tensor,
    momentum: float,
    lr: float,
) -> bool:
    """Update all tensors by torch's fused kernel of SGD on a CPU; return False if it does not suit them.

    Each velocity becomes momentum × velocity + scale × (gradient + decay × weight), and lr × velocity is
    subtracted from its weight. velocities: None if there is no momentum. scales, decays: a number for each
    tensor. Nothing has changed if the result is False.
    """
    lists = [weights, grads] if velocities is None else [weights, grads, velocities]
    pieces = [*iterate_pieces(*lists, is_divided=False)]
    parts = [part for _, of_lists in pieces for parts in of_lists for part in parts]
    # torch 2.13: the kernel computes other updates in bf16 and fp16.
    if is_fake(scales) or not all(_suits_kernel(part) and part.dtype == torch.float32 for part in parts):
        return False
    numbers = list(zip(scales.tolist(), decays.tolist(), strict=True))
    # The kernel computes the scale as 1 - dampening, so that a small one would have few digits. It takes no
    # velocities without momentum.
    if velocities is not None and not (momentum and all(scale > SMALLEST_SCALE for scale, _ in numbers)):
        return False
    for places, (of_weights, of_grads, *of_velocities) in pieces:
        for at, *tensors in zip(places, of_weights, of_grads, *of_velocities, strict=True):
            scale, decay = numbers[at]
            torch._fused_sgd_(
                [tensors[0]],
                [tensors[1]],
                tensors[2:],
                weight_decay=decay,
                momentum=momentum if of_velocities else 0.0,
                lr=lr if of_velocities else lr * scale,
                dampening=1 - scale if of_velocities else 0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
    return True


def _suits_kernel(tensor: Tensor) -> bool:
    """Return whether torch's fused kernels for CPUs, which ignore strides, update a tensor correctly."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()

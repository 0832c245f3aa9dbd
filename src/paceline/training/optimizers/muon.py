"""Muon: momentum whose matrices are orthogonalized, and AdamW for all other tensors."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.elementwise import subtract_adam_
from paceline.training.optimizers.matrices import update_matrices
from paceline.training.optimizers.pieces import iterate_pieces
from paceline.training.optimizers.whole_tensor import GroupTensors, Rounds, WholeTensorOptimizer

EPS = 1e-7  # of the norm in the Newton-Schulz iteration


class Muon(WholeTensorOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan et al., 2024), with the constants of torch.optim.Muon.

    matrix: whether the tensors of a group are matrices for Muon; others get AdamW. blocks, block_dim: a
    matrix is that many matrices along this dimension, such as a fused projection of queries, keys and
    values; each is orthogonalized alone. Tensors with more dimensions are matrices of their first dimension
    and the rest, as in the code of Jordan et al.

    ns_precision: "bf16", as torch, or "full", that of the weights. adjust_lr: "original" scales the update
    by √max(1, rows/columns), "match_rms_adamw" by 0.2 √max(rows, columns) (Liu et al., 2025).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_precision: str = "bf16",
        adjust_lr: str = "original",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        matrix: bool = True,
        blocks: int = 1,
        block_dim: int = 0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "ns_steps": ns_steps,
                "ns_coefficients": ns_coefficients,
                "ns_precision": ns_precision,
                "adjust_lr": adjust_lr,
                "betas": betas,
                "eps": eps,
                "matrix": matrix,
                "blocks": blocks,
                "block_dim": block_dim,
            },
        )

    def _update(self, tensors: GroupTensors) -> Rounds:
        options = tensors.options
        if not options["matrix"]:
            _update_adamw_(tensors)
        else:
            momentum, buffers = options["momentum"], tensors.moments("momentum_buffer")
            torch._foreach_lerp_(buffers, tensors.grads, 1 - momentum)
            updates = (
                torch._foreach_lerp(tensors.grads, buffers, momentum) if options["nesterov"] else buffers
            )
            directions = update_matrices(
                tensors.params, list(updates), lambda whole: _orthogonalize_blocks(whole, options)
            )
            torch._foreach_mul_(tensors.weights, 1 - options["lr"] * options["weight_decay"])
            torch._foreach_add_(tensors.weights, directions, alpha=-options["lr"])
        yield from ()


def _orthogonalize_blocks(whole: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the direction of a whole tensor, scaled for its shape."""
    blocks = []
    for block in whole.chunk(options["blocks"], options["block_dim"]):
        matrix = block.flatten(1)
        direction = orthogonalize(
            matrix, options["ns_steps"], options["ns_coefficients"], options["ns_precision"] == "bf16"
        )
        rows, columns = matrix.shape
        scale = (
            math.sqrt(max(1, rows / columns))
            if options["adjust_lr"] == "original"
            else 0.2 * math.sqrt(max(rows, columns))
        )
        blocks.append(direction.to(whole.dtype).mul_(scale).view(block.shape))
    return torch.cat(blocks, options["block_dim"])


def orthogonalize(
    matrix: Tensor, steps: int, coefficients: tuple[float, float, float], in_bf16: bool
) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, whose singular values are about 1."""
    a, b, c = coefficients
    x = matrix.bfloat16() if in_bf16 else matrix.clone()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _update_adamw_(tensors: GroupTensors) -> None:
    options = tensors.options
    firsts, seconds = tensors.moments("exp_avg"), tensors.moments("exp_avg_sq")
    steps = tensors.count_steps()
    for at, (weights, grads, *moments) in iterate_pieces(
        tensors.weights, tensors.grads, firsts, seconds, keys=steps, is_divided=False
    ):
        torch._foreach_mul_(weights, 1 - options["lr"] * options["weight_decay"])
        subtract_adam_(
            weights,
            grads,
            *moments,
            lr=options["lr"],
            betas=options["betas"],
            eps=options["eps"],
            step=steps[at[0]],
        )

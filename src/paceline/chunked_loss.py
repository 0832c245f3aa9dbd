"""Cross entropy of a linear layer without whole logits: losses and gradients of a few rows at a time.

With a large vocabulary, logits and their gradients need more memory than the rest of a small model. Here the
logits of a chunk are computed for its losses, dropped, and computed once more in the backward pass.

torch 2.13: `F.linear_cross_entropy` computes gradients in the forward pass, for one mean over all rows. A
task returns a loss for each item, and the items of all ranks and micro-batches are weighted afterwards.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import TaskError

IGNORED = -100  # the target of rows without a loss, as in F.cross_entropy
CHUNK_ELEMENTS = 2**24  # logits of a chunk: 64 MiB in float32


class CrossEntropyHead(nn.Linear):
    """The last layer of a classifier, with its loss.

    With targets it returns the cross entropy of each row, without them the logits:

        self.head = CrossEntropyHead(width, vocabulary, bias=False)
        losses = self.head(hidden, targets)

    hidden: (…, in_features). targets: class indices of shape (…).
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        if hasattr(self.weight, "device_mesh"):  # a DTensor
            raise TaskError(
                "a CrossEntropyHead cannot be split along its vocabulary; use a plan without tp, or an "
                "nn.Linear and F.cross_entropy"
            )
        return chunked_cross_entropy(hidden, self.weight, targets, self.bias)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Return the cross entropy of each row, like F.cross_entropy(F.linear(hidden, weight), targets).

    hidden: (…, d). weight: (classes, d). targets: class indices of shape (…), the shape of the result. rows:
    of a chunk [default: such that its logits take 64 MiB]. Under autocast, products are in its data type.
    Raises TaskError if the shapes differ.
    """
    if hidden.shape[:-1] != targets.shape:
        raise TaskError(
            f"hidden states of shape {tuple(hidden.shape)} have one target per row, got targets of shape "
            f"{tuple(targets.shape)}; under cp, use F.cross_entropy"
        )
    rows = rows or max(1, CHUNK_ELEMENTS // len(weight))
    losses: Tensor = _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), bias, rows)
    return losses.unflatten(0, targets.shape)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if is_cast else tensor.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, rows: int
    ) -> Tensor:
        ctx.rows, ctx.dtype = rows, _product_dtype(hidden)
        ctx.save_for_backward(hidden, weight, targets, bias)
        cast = weight.to(ctx.dtype)
        losses = [
            F.cross_entropy(_logits(part, cast, bias), target, reduction="none")
            for part, target in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias = ctx.saved_tensors
        needs_hidden, needs_weight, _, needs_bias, _ = ctx.needs_input_grad
        cast = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        parts = (tensor.split(ctx.rows) for tensor in (hidden, targets, grads[0]))
        for at, (part, target, grad) in enumerate(zip(*parts, strict=True)):
            of_logits = _logits(part, cast, bias).softmax(-1)
            of_logits[torch.arange(len(part), device=part.device), target.clamp(min=0)] -= 1
            of_logits *= (grad * (target != IGNORED))[:, None]
            if of_bias is not None:
                of_bias += of_logits.sum(0).to(of_bias.dtype)
            of_logits = of_logits.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[at * ctx.rows : at * ctx.rows + len(part)] = of_logits @ cast
            if of_weight is not None and ctx.dtype == of_weight.dtype:
                of_weight.addmm_(of_logits.T, part)
            elif of_weight is not None:
                of_weight += of_logits.T @ part.to(ctx.dtype)
        return of_hidden, of_weight, None, of_bias, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits of a chunk, at least in float32 for the loss."""
    logits = F.linear(hidden.to(weight.dtype), weight, bias.to(weight.dtype) if bias is not None else None)
    return logits if logits.dtype == torch.float64 else logits.float()

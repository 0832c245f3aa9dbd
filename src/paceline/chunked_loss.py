"""Cross entropy of a linear layer without whole logits: losses and gradients of a few rows at a time.

With a large vocabulary, logits and their gradients need more memory than the rest of a small model. Here the
logits of a chunk are computed for its losses, dropped, and computed once more in the backward pass. Chunks
share one buffer: memory that is allocated anew costs as much time as what is computed in it.

torch 2.13: `F.linear_cross_entropy` computes gradients in the forward pass, for one mean over all rows. A
task returns a loss for each item, and the items of all ranks and micro-batches are weighted afterwards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from paceline.errors import TaskError

IGNORED = -100  # the target of rows without a loss, as in F.cross_entropy
CHUNK_ELEMENTS = 2**24  # logits of a chunk: 64 MiB in float32


@dataclass(frozen=True)
class LossOptions:
    """What a loss adds to the cross entropy. Raises TaskError for values that make no sense.

    label_smoothing: share of the target that all classes get equally. z_loss: factor of log² Z, Z being the
    sum of the exponentials of the logits.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise TaskError(f"label_smoothing must be from 0 to 1, got {self.label_smoothing}")
        if not 0 <= self.z_loss < math.inf:
            raise TaskError(f"z_loss must be a number, at least 0, got {self.z_loss}")


PLAIN = LossOptions()


@dataclass(frozen=True)
class VocabularyPart:
    """The classes of which a rank has weights, if ranks divide them.

    begin: the first of them. classes: of all ranks. combine: returns the logarithm of the sum of the
    exponentials of all ranks, and the sum of their logits of the targets, from those of this rank.
    """

    begin: int
    classes: int
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class CrossEntropyHead(nn.Linear):
    """The last layer of a classifier, with its loss.

    With targets it returns the cross entropy of each row, without them the logits:

        self.head = CrossEntropyHead(width, vocabulary, bias=False)
        losses = self.head(hidden, targets)

    hidden: (…, in_features). targets: class indices of shape (…); -100 has no loss. label_smoothing: as in
    F.cross_entropy. z_loss: factor of log² of the sum of the exponentials (Chowdhery et al., PaLM, 2022).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.options = LossOptions(label_smoothing, z_loss)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        return chunked_cross_entropy(hidden, self.weight, targets, self.bias, options=self.options)


def count_chunk_rows(classes: int) -> int:
    """Return the rows of a chunk."""
    return max(1, CHUNK_ELEMENTS // classes)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    rows: int | None = None,
    part: VocabularyPart | None = None,
    options: LossOptions = PLAIN,
) -> Tensor:
    """Return the cross entropy of each row, like F.cross_entropy(F.linear(hidden, weight), targets).

    hidden: (…, d). weight: (classes, d). targets: class indices of shape (…), the shape of the result. rows:
    of a chunk [default: such that its logits take 64 MiB]. part: which classes `weight` and `bias` have
    [default: all]; the gradient of `hidden` is then that of these classes. Under autocast, products are in
    its data type. Raises TaskError if the shapes differ, and IndexError for a target that is not a class.
    """
    if has_torch_function((hidden, weight)):  # planning counts it as one operation
        result: Tensor = handle_torch_function(
            chunked_cross_entropy, (hidden, weight), hidden, weight, targets, bias, rows, part, options
        )
        return result
    if hidden.shape[:-1] != targets.shape:
        raise TaskError(
            f"hidden states of shape {tuple(hidden.shape)} have one target per row, got targets of shape "
            f"{tuple(targets.shape)}; under cp, use F.cross_entropy"
        )
    rows = rows or count_chunk_rows(len(weight))
    losses: Tensor = _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2), weight, targets.flatten(), bias, rows, part, options
    )
    return losses.unflatten(0, targets.shape)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if is_cast else tensor.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        rows: int,
        part: VocabularyPart | None,
        options: LossOptions,
    ) -> Tensor:
        ctx.rows, ctx.dtype = rows, _product_dtype(hidden)
        ctx.part, ctx.options = part, options
        ctx.classes = part.classes if part is not None else len(weight)
        _check_targets(targets, ctx.classes)
        chosen, is_own = _find_columns(targets, len(weight), part)
        logits = _Logits(hidden, weight, bias, rows, ctx.dtype)
        sums, picked = logits.new_rows(len(hidden)), logits.new_rows(len(hidden))
        for at in range(0, len(hidden), rows):
            chunk = slice(at, at + rows)
            of_chunk = logits.compute(hidden[chunk])
            picked[chunk] = _pick(
                of_chunk, chosen[chunk], is_own[chunk], ctx.classes, options.label_smoothing
            )
            largest = of_chunk.amax(1, keepdim=True).clamp_(min=torch.finfo(of_chunk.dtype).min)
            exponentials = of_chunk.sub_(largest).exp_()
            sums[chunk] = exponentials.sum(1).log_().add_(largest[:, 0])
        if part is not None:
            sums, picked = part.combine(sums, picked)
        ctx.save_for_backward(hidden, weight, targets, bias, sums)
        losses = sums - picked
        if options.z_loss:
            losses += options.z_loss * sums.square()
        return losses.masked_fill_(targets == IGNORED, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, sums = ctx.saved_tensors
        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        chosen, is_own = _find_columns(targets, len(weight), ctx.part)
        scales = grads[0].masked_fill(targets == IGNORED, 0)[:, None]
        smoothing, z_loss = ctx.options.label_smoothing, ctx.options.z_loss
        logits = _Logits(hidden, weight, bias, ctx.rows, ctx.dtype)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        for at in range(0, len(hidden), ctx.rows):
            chunk = slice(at, at + ctx.rows)
            of_logits = logits.compute(hidden[chunk]).sub_(sums[chunk, None]).exp_()
            if z_loss:
                of_logits *= 1 + 2 * z_loss * sums[chunk, None]
            if smoothing:
                of_logits -= smoothing / ctx.classes
            ones = (1 - smoothing) * is_own[chunk, None].to(of_logits.dtype)
            of_logits.scatter_add_(1, chosen[chunk, None], -ones).mul_(scales[chunk])
            if of_bias is not None:
                of_bias += of_logits.sum(0).to(of_bias.dtype)
            of_logits = of_logits.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = of_logits @ logits.weight
            if of_weight is not None and ctx.dtype == of_weight.dtype:
                of_weight.addmm_(of_logits.T, hidden[chunk])
            elif of_weight is not None:
                of_weight += of_logits.T @ hidden[chunk].to(ctx.dtype)
        return of_hidden, of_weight, None, of_bias, None, None, None


def _pick(logits: Tensor, chosen: Tensor, is_own: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return this rank's part of the logits that the loss subtracts, weighted with the smoothed targets."""
    picked = logits.gather(1, chosen[:, None])[:, 0].masked_fill_(~is_own, 0)
    if not smoothing:
        return picked
    return (1 - smoothing) * picked + smoothing / classes * logits.sum(1)


def _find_columns(targets: Tensor, columns: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return the column of each target in the logits of this rank, or 0, and whether the target is there."""
    local = targets if part is None else targets - part.begin
    is_own = (targets != IGNORED) & (local >= 0) & (local < columns)
    return local.where(is_own, 0), is_own


def _check_targets(targets: Tensor, classes: int) -> None:
    """Raise IndexError for a target that is not a class; on a GPU, its assertion fails later."""
    column = torch.zeros(1, device=targets.device).expand(classes)
    column.index_select(0, targets.where(targets != IGNORED, 0))


class _Logits:
    """Computes the logits of chunks in one buffer, at least in float32 for the loss."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype):
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype) if bias is not None else None
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.product = hidden.new_empty((min(rows, len(hidden)), len(weight)), dtype=dtype)
        self.is_wide = dtype == self.dtype
        self.logits = self.product if self.is_wide else torch.empty_like(self.product, dtype=self.dtype)

    def compute(self, hidden: Tensor) -> Tensor:
        """Return the logits of a chunk, whose memory the next call uses again."""
        product, logits = self.product[: len(hidden)], self.logits[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden.to(self.weight.dtype), self.weight.T, out=product)
        else:
            torch.addmm(self.bias, hidden.to(self.weight.dtype), self.weight.T, out=product)
        return product if self.is_wide else logits.copy_(product)

    def new_rows(self, count: int) -> Tensor:
        """Return an empty number for each of `count` rows."""
        return self.logits.new_empty(count)

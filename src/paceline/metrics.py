"""Metrics that are not means of values by item: accumulators, which `Task.metrics` may return.

from paceline.metrics import Accuracy, Perplexity, TopKAccuracy

def metrics(self, output, batch):
    return {"accuracy": Accuracy().update(output, batch[1]), "top5": TopKAccuracy(5).update(output, batch[1])}
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import TaskError

__all__ = ["Accumulator", "Accuracy", "Perplexity", "TopKAccuracy"]

IGNORE_INDEX = -100  # as in torch.nn.functional.cross_entropy


class Accumulator(ABC):
    """Base class of a metric that is not a mean of values by item, such as an F1 score.

        class F1(Accumulator):
            hits = predicted = actual = 0

            def update(self, output, target):
                positive = output > 0
                self.hits += (positive & target).sum()
                self.predicted += positive.sum()
                self.actual += target.sum()
                return self

            def merge(self, other):
                self.hits += other.hits
                self.predicted += other.predicted
                self.actual += other.actual

            def finish(self):
                return 2 * self.hits / (self.predicted + self.actual)

    `Task.metrics` returns a new, updated accumulator for each batch: `{"f1": F1().update(output, batch[1])}`.
    Paceline merges the accumulators of all batches and ranks, and finishes the result on one rank. The
    attributes of an accumulator are its state. They must be picklable. On several ranks, tensors are on the
    CPU when accumulators of different ranks are merged.

    The result is exact for any number of ranks if the state of a split does not depend on how the split is
    divided into batches, nor on the order of merges.
    """

    _is_returned = False  # whether Task.metrics has returned this object before

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name, value in vars(cls).items():
            if isinstance(value, (Tensor, list, dict, set)) and not name.startswith("__"):
                raise TaskError(
                    f"{cls.__name__}.{name} is a {type(value).__name__} of the class, which all accumulators "
                    "would share; assign it in __init__"
                )

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> Self:
        """Add the samples of a batch, and return the accumulator. Only the task calls it."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add what another accumulator of the same class has counted."""

    @abstractmethod
    def finish(self) -> float | Tensor | Mapping[str, float | Tensor]:
        """Return the metric of all samples: a number, a tensor of numbers, or a dict of these.

        An element of a tensor becomes the metric `NAME/INDEX`, and an entry of a dict `NAME/KEY`.
        """


class _Mean(Accumulator):
    """A mean of values by item, weighted.

    ignore_index: target of items that do not count.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX):
        self.ignore_index = ignore_index
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0

    def _add(self, values: Tensor, weights: Tensor) -> Self:
        self.total = self.total + (values * weights).sum()
        self.weight = self.weight + weights.sum()
        return self

    def merge(self, other: Self) -> None:
        self.total = self.total + other.total
        self.weight = self.weight + other.weight

    def finish(self) -> float:
        """Return the mean; NaN without items."""
        return float(self.total) / float(self.weight) if float(self.weight) else math.nan


class Accuracy(_Mean):
    """Share of the items whose class has the highest score.

        Accuracy().update(output, batch[1])

    ignore_index: target of items that do not count.
    """

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Self:
        """Add a batch, and return the accumulator.

        scores: of each class, shape (…, classes). targets: indices of the right classes, shape (…).
        weights: of the items, in the shape of targets; None: all weigh the same. Raises TaskError.
        """
        weights = _check_items("Accuracy", scores, targets, weights, self.ignore_index)
        return self._add(scores.argmax(-1) == targets, weights)


class TopKAccuracy(_Mean):
    """Share of the items whose class is among the k classes with the highest scores.

        TopKAccuracy(5).update(output, batch[1])

    ignore_index: target of items that do not count. Raises TaskError for a `k` below 1.
    """

    def __init__(self, k: int, ignore_index: int = IGNORE_INDEX):
        if not isinstance(k, int) or k < 1:
            raise TaskError(f"TopKAccuracy: k must be an integer, at least 1, got {k!r}")
        super().__init__(ignore_index)
        self.k = k

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Self:
        """Add a batch, and return the accumulator.

        scores: of each class, shape (…, classes). targets: indices of the right classes, shape (…).
        weights: of the items, in the shape of targets; None: all weigh the same. Raises TaskError.
        """
        weights = _check_items("TopKAccuracy", scores, targets, weights, self.ignore_index)
        if self.k > scores.shape[-1]:
            raise TaskError(
                f"TopKAccuracy: k={self.k} exceeds the number of classes, {scores.shape[-1]}; use a smaller k"
            )
        is_hit = (scores.topk(self.k, -1).indices == targets.unsqueeze(-1)).any(-1)
        return self._add(is_hit, weights)


class Perplexity(_Mean):
    """Exponential of the mean cross entropy (in nats) of all items, such as the tokens of a text.

        Perplexity().update(output[:, :-1], batch["tokens"][:, 1:])

    ignore_index: target of items that do not count, such as padding.
    """

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Self:
        """Add a batch, and return the accumulator.

        scores: logits of each class, shape (…, classes). targets: indices of the right classes, shape (…).
        weights: of the items, in the shape of targets; None: all weigh the same. Raises TaskError.
        """
        weights = _check_items("Perplexity", scores, targets, weights, self.ignore_index)
        logits = scores.reshape(-1, scores.shape[-1])
        with torch.autocast(scores.device.type, enabled=False):
            losses = F.cross_entropy(
                logits if logits.dtype == torch.float64 else logits.float(),
                targets.reshape(-1).long(),
                ignore_index=self.ignore_index,
                reduction="none",
            )
        # An infinite loss of an item without weight does not count.
        losses = torch.where(weights.reshape(-1) == 0, 0.0, losses.double())
        return self._add(losses, weights.reshape(-1))

    def finish(self) -> float:
        """Return the perplexity, at least 1; NaN without items, infinity if it exceeds a float."""
        mean = super().finish()
        return math.exp(mean) if not mean > 709 else math.inf  # exp(710) raises OverflowError


def _check_items(
    name: str, scores: Tensor, targets: Tensor, weights: Tensor | None, ignore_index: int
) -> Tensor:
    """Return the weights of the items in float64, 0 where the target is `ignore_index`. Raises TaskError."""
    for what, value in (("scores", scores), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TaskError(f"{name}: {what} must be a tensor, got {type(value).__name__}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        dtype = str(targets.dtype).removeprefix("torch.")
        raise TaskError(f"{name}: targets must be indices of classes, as integers, got {dtype}")
    if scores.dim() != targets.dim() + 1 or scores.shape[:-1] != targets.shape or not scores.shape[-1]:
        expected = ", ".join([*map(str, targets.shape), "classes"])
        raise TaskError(
            f"{name}: scores must have the shape of the targets and a last dimension of classes, "
            f"({expected}), got {tuple(scores.shape)}"
        )
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != targets.shape):
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise TaskError(
            f"{name}: weights must have the shape of the targets, {tuple(targets.shape)}, got {got}"
        )
    is_counted = targets != ignore_index
    is_wrong = is_counted & ((targets < 0) | (targets >= scores.shape[-1]))
    if is_wrong.any():
        raise TaskError(
            f"{name}: target {int(targets[is_wrong][0])} is not a class from 0 to {scores.shape[-1] - 1}; "
            f"items with the target ignore_index={ignore_index} do not count"
        )
    return is_counted.double() if weights is None else weights.double() * is_counted

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

__all__ = [
    "Accumulator",
    "Accuracy",
    "MeanAveragePrecision",
    "MultilabelF1",
    "Perplexity",
    "TopKAccuracy",
]

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


class MultilabelF1(Accumulator):
    """F1 of several labels: `micro` over all decisions, `macro` as the mean over the classes.

        MultilabelF1().update(output, batch[1])

    A class without labels and without predictions has an F1 of 0, as in scikit-learn.
    threshold: the score above which a label is predicted; 0 for logits, 0.5 for probabilities.
    """

    def __init__(self, threshold: float = 0.0):
        self.threshold = threshold
        self.counts: Tensor | float = 0.0  # of hits, predictions and labels, by class

    def update(self, scores: Tensor, targets: Tensor) -> Self:
        """Add a batch, and return the accumulator.

        scores: of each class, shape (…, classes). targets: 1 for each label, in the same shape. Raises
        TaskError.
        """
        actual = _check_labels("MultilabelF1", scores, targets)
        predicted = scores.reshape(actual.shape) > self.threshold
        sums = [(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)]
        self.counts = self.counts + torch.stack(sums).double()
        return self

    def merge(self, other: Self) -> None:
        self.counts = self.counts + other.counts

    def finish(self) -> dict[str, float]:
        """Return `micro` and `macro`; NaN without samples."""
        if not isinstance(self.counts, Tensor):
            return {"micro": math.nan, "macro": math.nan}
        hits, predicted, actual = self.counts
        by_class = 2 * hits / (predicted + actual).clamp(min=1)
        total = float((predicted + actual).sum())
        return {"micro": 2 * float(hits.sum()) / max(total, 1.0), "macro": float(by_class.mean())}


class MeanAveragePrecision(Accumulator):
    """Mean over the classes of the average precision, the sum of precision × increase of recall.

        MeanAveragePrecision().update(output, batch[1])

    It keeps all scores of the split, 5 bytes for each class of a sample. Equal scores are one threshold, as
    in scikit-learn. Classes without labels in the split do not count.
    """

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, scores: Tensor, targets: Tensor) -> Self:
        """Add a batch, and return the accumulator. Arguments and errors are those of MultilabelF1."""
        actual = _check_labels("MeanAveragePrecision", scores, targets)
        scores = scores.detach().reshape(actual.shape)
        self.scores.append((scores if scores.dtype == torch.float64 else scores.float()).cpu())
        self.targets.append(actual.cpu())
        return self

    def merge(self, other: Self) -> None:
        self.scores += other.scores
        self.targets += other.targets

    def finish(self) -> float:
        """Return the mean; NaN if no class has a label."""
        if not self.scores:
            return math.nan
        pairs = zip(torch.cat(self.scores).T, torch.cat(self.targets).T, strict=True)
        found = [_average_precision(scores, targets) for scores, targets in pairs if targets.any()]
        return sum(found) / len(found) if found else math.nan


def _average_precision(scores: Tensor, targets: Tensor) -> float:
    """Return the average precision of one class with at least one label."""
    values, order = scores.sort(descending=True)
    hits = targets[order].double().cumsum(0)
    last = torch.cat([values[1:] != values[:-1], torch.tensor([True])])  # of each threshold
    hits, counts = hits[last], torch.arange(1, len(values) + 1, dtype=torch.float64)[last]
    recall = hits / hits[-1]
    return float((hits / counts * recall.diff(prepend=torch.zeros(1, dtype=torch.float64))).sum())


def _check_labels(name: str, scores: Tensor, targets: Tensor) -> Tensor:
    """Return the labels as bool of shape (items, classes). Raises TaskError."""
    if scores.shape != targets.shape or not scores.dim():
        raise TaskError(
            f"{name}: scores and targets must have the same shape (…, classes), got {tuple(scores.shape)} and"
            f" {tuple(targets.shape)}"
        )
    actual = targets.reshape(-1, targets.shape[-1]) != 0
    if (actual.to(targets.dtype) != targets.reshape(actual.shape)).any():
        raise TaskError(f"{name}: targets must be 0 or 1")
    return actual

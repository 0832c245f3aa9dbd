"""Several losses by name: the weighted sum that is minimized, and the sums that a step reports."""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.batch import count_samples
from paceline.data.samples import Batch
from paceline.distributed.dtensor import is_dtensor
from paceline.errors import TaskError
from paceline.task import Task
from paceline.user_code import UserCode

NamedLosses = dict[str, Tensor]
Value = TypeVar("Value")
REPORTED = ("loss", "grad_norm", "lr", "samples_per_s")  # what a step reports under these names


def combine_losses(
    task: Task, values: Mapping[str, Any], batch: Batch, weights: Tensor | None
) -> tuple[Tensor, NamedLosses]:
    """Return the weighted sum of the losses that `loss` returned by name, and each of them.

    Each has an item for each sample, or for each weight if the task defines `weights`. So has the sum, unless
    a loss is a scalar: the sum is then a scalar too, which counts as the mean over these items.

    Raises TaskError for losses that cannot be added.
    """
    if not values:
        raise TaskError("loss() returned an empty dict; return at least one loss")
    factors = read_factors(task)
    tensors = {name: _check_loss(name, value, weights) for name, value in values.items()}
    named = {name: _by_item(name, value, batch, weights) for name, value in tensors.items()}
    parts = named if all(value.dim() for value in tensors.values()) else _means(named, weights)
    with UserCode("the sum of the losses", task.loss):
        whole = reduce(add, [factors.get(name, 1.0) * value for name, value in parts.items()])
    return whole, named


def check_loss_weights(task: Task, values: object) -> None:
    """Raise TaskError if `loss_weights` has names that are not in `values`, what `loss` returned in training.

    In an evaluation there may be fewer losses than in training.
    """
    if isinstance(values, Mapping):
        check_weight_names(task, values, "loss() does not return; it returns")
    elif read_factors(task):
        raise TaskError(
            f"{type(task).__name__} defines loss_weights(), but loss() returned "
            f"{'one tensor' if isinstance(values, Tensor) else type(values).__name__}; return a dict of "
            "losses by name"
        )


def check_weight_names(task: Task, names: Iterable[object], lacking: str) -> None:
    """Raise TaskError if `loss_weights` has a name that is not among `names`.

    lacking: who does not return it, for the message, which lists the names after it.
    """
    names = list(names)
    if unknown := [name for name in read_factors(task) if name not in names]:
        raise TaskError(f"loss_weights() has {unknown[0]!r}, which {lacking} {', '.join(map(str, names))}")


def read_factors(task: Task) -> dict[str, float]:
    """Return the weights of the losses, by name. Raises TaskError."""
    with UserCode("loss_weights()", task.loss_weights):
        factors: Any = task.loss_weights()
    if not isinstance(factors, Mapping):
        raise TaskError(f"loss_weights() must return a dict of numbers, got {type(factors).__name__}")
    for name, factor in factors.items():
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            got = repr(factor) if isinstance(factor, float) else type(factor).__name__
            raise TaskError(f"loss_weights() must return finite numbers, got {got} for {name!r}")
    return dict(factors)


def _check_loss(name: object, value: Any, weights: Tensor | None) -> Tensor:
    """Return a named loss as a whole tensor. Raises TaskError if it cannot be a loss."""
    if not isinstance(name, str):
        raise TaskError(f"loss() must return a dict with names as keys, got {name!r}")
    if name in REPORTED:
        raise TaskError(
            f"loss() returned a loss named {name!r}, under which each step reports another value; rename it"
        )
    if not isinstance(value, Tensor):
        raise TaskError(f"loss() must return a dict of tensors, got {type(value).__name__} for {name!r}")
    if not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise TaskError(f"loss() must return real floating-point tensors, got {dtype} for {name!r}")
    given: Any = value
    whole: Tensor = given.full_tensor() if is_dtensor(value) else value
    if weights is not None and whole.dim() and whole.shape != weights.shape:
        raise TaskError(
            f"loss() returned {name!r} of shape {tuple(whole.shape)}, and weights() the shape "
            f"{tuple(weights.shape)}; return losses of the shape of the weights"
        )
    return whole


def _by_item(name: str, value: Tensor, batch: Batch, weights: Tensor | None) -> Tensor:
    """Return a named loss with an item for each sample, or for each weight."""
    if weights is not None:
        return value.expand(weights.shape)
    samples = count_samples(batch)
    if not value.dim():
        return value.expand(samples)
    if not value.numel() or value.numel() % samples:
        raise TaskError(
            f"loss() returned {value.numel()} values of {name!r} for a batch of {samples} samples; return "
            "one or more for each sample, and if the number of items varies, define weights(batch) of the "
            "shape of each loss"
        )
    return value.reshape(samples, -1).mean(1)


def _means(named: NamedLosses, weights: Tensor | None) -> NamedLosses:
    """Return the mean over the items of each loss."""
    if weights is None:
        return {name: value.mean() for name, value in named.items()}
    total = weights.sum()
    total = torch.where(total > 0, total, 1.0)  # if all weights are 0, the mean is 0 too
    return {name: (value * weights).sum() / total for name, value in named.items()}


def name_losses(update: str, loss: Value, named: Mapping[str, Value]) -> dict[str, Value]:
    """Return the losses that a pass reports beside the whole loss, by name: `critic`, `critic.real`.

    update: its name; "": the pass of the task's own loss, whose named losses keep their names.
    """
    if not update:
        return dict(named)
    return {update: loss, **{f"{update}.{name}": value for name, value in named.items()}}


class NamedLossSums:
    """The sums of loss × weight of each named loss over the micro-batches of a step.

    `names` are those of the first batch; None before it. All batches must have the same names.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None
        self.sums: NamedLosses = {}

    def begin(self) -> None:
        """Begin a step."""
        self.sums = {}

    def add(self, named: NamedLosses, weights: Tensor | None) -> None:
        """Add the losses of a micro-batch, with an item for each sample, or for each weight.

        Raises TaskError if their names are not those of the batches before.
        """
        names = frozenset(named)
        if self.names is None:
            self.names = names
        check_same_names(self.names, names)
        for name, values in named.items():
            values = values.detach()
            total = (values if weights is None else values * weights).sum()
            self._add(name, total)

    def add_auxiliary(self, totals: Mapping[str, Tensor]) -> None:
        """Add losses × items of a micro-batch that `loss` did not return."""
        for name, total in totals.items():
            self._add(name, total)

    def _add(self, name: str, total: Tensor) -> None:
        self.sums[name] = self.sums[name] + total if name in self.sums else total


def check_same_names(first: frozenset[str], second: frozenset[str]) -> None:
    """Raise TaskError if two batches have losses of different names."""
    if different := first ^ second:
        raise TaskError(
            f"loss() returned {min(different)!r} only in some batches; return the same names in all"
        )

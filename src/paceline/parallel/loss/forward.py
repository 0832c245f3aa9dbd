"""The forward pass of a task: its model, its loss and the weights of its items."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.batch import count_samples
from paceline.data.samples import Batch
from paceline.distributed.dtensor import is_dtensor
from paceline.errors import TaskError
from paceline.parallel.loss.auxiliary_loss import AuxiliaryLoss, add_auxiliary_loss, has_auxiliary_loss
from paceline.parallel.loss.named_losses import (
    NamedLosses,
    NamedLossSums,
    check_loss_weights,
    combine_losses,
)
from paceline.task import Task
from paceline.user_code import UserCode

ELSEWHERE = object()
MIXED_WEIGHTS = (
    "weights() returned None for some batches and a tensor for others; return a tensor for every batch, or "
    "None for every batch if all items weigh the same"
)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return the autocast context of a precision.

    Weights stay float32 under every plan and torch casts them per operation, so all plans compute the same.
    """
    if precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[precision])
    return contextlib.nullcontext()


def call_model(task: Task, model: nn.Module, batch: Batch) -> object:
    """Return the output of `model` for a batch, without conversion of the task's exceptions."""
    return _apply_model(model, task.inputs(batch))


def _apply_model(model: nn.Module, inputs: object) -> object:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def forward(task: Task, model: nn.Module, batch: Batch) -> object:
    """Return the output of `model` for a batch. Raises TaskError for exceptions of the task."""
    with UserCode("inputs()", task.inputs):
        inputs = task.inputs(batch)
    with UserCode("the forward pass", task.model):
        return _apply_model(model, inputs)


def has_global_loss(task: Task) -> bool:
    """Return whether the task defines `global_loss` in place of `loss`."""
    return type(task).global_loss is not Task.global_loss


def call_loss(task: Task, output: Any, batch: Batch) -> Tensor:
    """Return the loss of a batch that is not divided, with its auxiliary loss.

    Exceptions of the task are not converted. Named losses are combined.
    """
    loss = call_loss_by_item(task, output, batch)
    return add_auxiliary_loss(task, loss, output, batch) if has_auxiliary_loss(task) else loss


def call_loss_by_item(task: Task, output: Any, batch: Batch) -> Tensor:
    """Return the loss of a batch without its auxiliary loss, otherwise as `call_loss` does."""
    if has_global_loss(task):
        return task.global_loss(output, batch)
    values = task.loss(output, batch)
    if not isinstance(values, Mapping):
        return values
    return combine_losses(task, values, batch, read_weights(task, batch))[0]


LossInspector = Callable[[object, Batch, Tensor], None]


def compute_weighted_loss(
    task: Task,
    model: nn.Module,
    batch: Batch,
    examine: LossInspector | None = None,
    sums: NamedLossSums | None = None,
    auxiliary: AuxiliaryLoss | None = None,
) -> tuple[Tensor, Tensor | float]:
    """Return the sum of loss × weight over the items of a batch, and the sum of their weights (1 by default).

    examine: called with the output, the batch and the loss. sums: to which the named losses are added.
    auxiliary: whose backward pass is made part of that of the loss; its value is not added.
    """
    output = forward(task, model, batch)
    with UserCode("loss()", task.loss):
        values: Any = task.loss(output, batch)
    weights = read_weights(task, batch)
    if auxiliary is None:
        check_loss_weights(task, values)
    named: NamedLosses = {}
    if isinstance(values, Mapping):
        values, named = combine_losses(task, values, batch, weights)
    whole = values.full_tensor() if is_dtensor(values) else values
    if examine is not None:
        examine(output, batch, whole)
    if sums is not None:
        sums.add(named, weights)
    total, items = weighted_sum(whole, weights, batch, "loss()")
    return total if auxiliary is None else auxiliary.attach(total, output, batch), items


def read_weights(task: Task, batch: Batch) -> Tensor | None:
    if type(task).weights is Task.weights:
        return None
    with UserCode("weights()", task.weights):
        return task.weights(batch)


def weighted_sum(
    values: Tensor, weights: Tensor | None, batch: Batch, what: str
) -> tuple[Tensor, Tensor | float]:
    """Return the sum of values × weights and the sum of the weights.

    A scalar is the mean over the samples of its batch.
    what: the name of the function that returned `values`, for messages.
    """
    if not isinstance(values, Tensor):
        raise TaskError(f"{what} must return a tensor, got {type(values).__name__}")
    if values.dim() == 0:
        count = weights.sum() if weights is not None else float(count_samples(batch))
        return values * count, count
    if weights is None:
        return values.sum(), float(values.numel())
    if weights.shape != values.shape:
        raise TaskError(
            f"weights() must return the shape of {what}, {tuple(values.shape)}, got {tuple(weights.shape)}"
        )
    return (values * weights).sum(), weights.sum()


def _total_weight(task: Task, batches: Sequence[Batch]) -> Tensor:
    weights = [read_weights(task, batch) for batch in batches]
    if any(weight is None for weight in weights):
        raise TaskError(MIXED_WEIGHTS)
    return torch.stack([weight.sum().double() for weight in weights if weight is not None]).sum()


def agree_on_weights(task: Task, batches: Sequence[Batch], device: torch.device) -> bool:
    """Return whether the items of the loss have weights. A collective, if the task defines `weights`.

    batches: of this rank. Raises TaskError on all ranks if `weights` returns a tensor for some batches only.
    """
    if type(task).weights is Task.weights:
        return False
    found = [read_weights(task, batch) is not None for batch in batches]
    ends = torch.tensor([not all(found), any(found)], dtype=torch.int32, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(ends, dist.ReduceOp.MAX)
    has_none, has_weights = ends.tolist()
    if has_none and has_weights:
        raise TaskError(MIXED_WEIGHTS)
    return bool(has_weights)


class LocalWeight:
    """The weight of a global batch if every rank had the weight of this one.

    Dividing this rank's loss by it gives a mean over its items.
    """

    def __init__(self, task: Task, batches: Sequence[Batch], data_ranks: int):
        self._sum, self._data_ranks = _total_weight(task, batches), data_ranks

    def result(self) -> Tensor:
        # If all weights are 0, the gradients are 0 too.
        return torch.where(self._sum > 0, self._sum, 1.0) * self._data_ranks


class GlobalWeight:
    """The weight of the global batch, summed over the ranks during the first forward pass.

    counted: whether this rank counts, of the ranks with the same samples.
    """

    def __init__(self, task: Task, batches: Sequence[Batch], counted: bool):
        self._sum = _total_weight(task, batches) * counted
        self._work = dist.all_reduce(self._sum, async_op=True) if dist.get_world_size() > 1 else None

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._sum

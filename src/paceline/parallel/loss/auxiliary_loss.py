"""An auxiliary loss: a function of sums over the samples of the global batch, such as a balance of experts.

Each data rank sums over its own samples. The sums of all ranks and micro-batches are added, and each rank
differentiates the loss with respect to them. This gradient enters the backward pass of each micro-batch where
its own sums are. So only the sums are sent, and nothing is gathered.

All sums must be known before the first backward pass. With several micro-batches, a pass without gradients
computes them first. A pipeline needs none if all its forward passes come before its backward passes, as in
GPipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.fake import is_close, is_fake
from paceline.data.samples import Batch
from paceline.errors import PlanError, TaskError
from paceline.parallel.loss.batch_sums import Sums, SumsOfParts, read_sums
from paceline.parallel.loss.named_losses import (
    REPORTED,
    NamedLosses,
    NamedLossSums,
    check_weight_names,
    read_factors,
)
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task
from paceline.user_code import UserCode

UNNAMED = "auxiliary"  # name of an auxiliary loss that is one tensor
RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}  # of sums that should be equal
COARSE_RTOL = 3e-2  # for other dtypes


def has_auxiliary_loss(task: Task) -> bool:
    """Return whether the task adds a function of sums over the global batch to its loss."""
    return task._has_auxiliary_loss()


def check_auxiliary_loss(task: Task, plan: ResolvedPlan) -> None:
    """Raise PlanError if the task has an auxiliary loss that `plan` cannot compute."""
    if not has_auxiliary_loss(task):
        return
    reason = fix = ""
    if plan.is_asynchronous:
        reason = "its ranks update their weights separately"
        fix = "use single, ddp, zero1, zero2, zero3, hsdp, tp, cp or pp"
    elif plan.pp > 1 and plan.microbatches > 1 and plan.pp_schedule != "gpipe":
        reason = "its first backward pass begins before the sums of all micro-batches are known"
        fix = "use pp_schedule=gpipe or microbatches=1"
    if reason:
        raise PlanError(
            f"plan {plan} cannot compute auxiliary_loss() of {type(task).__name__}: {reason}; {fix}"
        )


def compute_auxiliary_loss(task: Task, sums: Sums) -> tuple[Tensor, NamedLosses]:
    """Return the weighted sum of the auxiliary losses, and each by name. Raises TaskError.

    sums: over all samples.
    """
    with UserCode("auxiliary_loss()", task.auxiliary_loss):
        result: Any = task.auxiliary_loss(dict(sums))
    if isinstance(result, Mapping) and not result:
        raise TaskError("auxiliary_loss() returned an empty dict; return at least one loss")
    losses = dict(result) if isinstance(result, Mapping) else {UNNAMED: result}
    for name, value in losses.items():
        _check_loss(name, value)
    factors = read_factors(task)
    return reduce(add, [factors.get(name, 1.0) * value for name, value in losses.items()]), losses


def _check_loss(name: object, value: Any) -> None:
    what = "one number" if name == UNNAMED else f"one number for {name!r}"
    if not isinstance(name, str):
        raise TaskError(f"auxiliary_loss() must return a dict with names as keys, got {name!r}")
    if name in REPORTED:
        raise TaskError(
            f"auxiliary_loss() returned a loss named {name!r}, under which each step reports another value; "
            "rename it"
        )
    if not isinstance(value, Tensor):
        raise TaskError(f"auxiliary_loss() must return {what} as a tensor, got {type(value).__name__}")
    if value.dim():
        raise TaskError(f"auxiliary_loss() must return {what}, got a tensor of shape {tuple(value.shape)}")
    if not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise TaskError(f"auxiliary_loss() must return {what} as a real floating-point tensor, got {dtype}")


def add_auxiliary_loss(task: Task, loss: Tensor, output: Any, batch: Batch) -> Tensor:
    """Return the loss of a batch that is not divided, with its auxiliary loss added to each item."""
    return loss + compute_auxiliary_loss(task, read_sums(task, output, batch))[0]


@dataclass(frozen=True)
class SolvedStep:
    """The auxiliary loss of a global batch.

    loss: the weighted sum of the losses. named: each of them. gradients: with respect to the sums, times the
    factor with which the backward pass starts; a sum without gradient is absent.
    """

    loss: Tensor
    named: NamedLosses
    gradients: Sums


class AuxiliaryLoss:
    """The auxiliary loss of a task in training. For each step call `begin`, then `attach` in each pass.

    group: ranks with the same part of the model and other samples; None: all. data_ranks: their number.
    """

    def __init__(self, task: Task, group: dist.ProcessGroup | None, data_ranks: int, device: torch.device):
        self.task, self.group, self.data_ranks, self.device = task, group, data_ranks, device
        self.solved: SolvedStep | None = None  # None: sums of this step are missing
        self._microbatches, self._start, self._checks = 0, 1.0, False
        self._parts = SumsOfParts()
        self._first_pass: list[Sums] = []
        self._has_agreed = False

    def begin(self, microbatches: int, start: float, checks: bool) -> None:
        """Begin a step.

        start: factor of all gradients, by which engines and loss scaling divide later. checks: whether to
        check that a second pass of a micro-batch repeats the first.
        """
        self.solved, self._parts, self._first_pass = None, SumsOfParts(), []
        self._microbatches, self._start, self._checks = microbatches, start, checks

    def add(self, output: Any, batch: Batch) -> Sums:
        """Add the sums of the next micro-batch, and return them. A collective with the last micro-batch."""
        sums = read_sums(self.task, output, batch)
        if not sums:
            raise TaskError("batch_sums() returned an empty dict; return at least one sum")
        self._parts.add(sums)
        self._first_pass.append({name: value.detach() for name, value in sums.items()})
        if len(self._first_pass) == self._microbatches:  # of the last one
            self.solved = self._solve()
        return sums

    def attach(self, loss: Tensor, output: Any, batch: Batch) -> Tensor:
        """Return the loss with the same value, whose backward pass includes that of the auxiliary loss.

        The sums of all micro-batches must be known when this backward pass begins. They are computed here
        unless `add` was called before for all micro-batches.
        """
        if self.solved is None:
            sums = self.add(output, batch)
        else:  # the second pass of a micro-batch
            sums = read_sums(self.task, output, batch)
            self._check_repeated(self._first_pass.pop(0), sums)
        names = [
            name
            for name, value in sums.items()
            if value.requires_grad and (self.solved is None or name in self.solved.gradients)
        ]
        if not names:
            raise TaskError(
                "batch_sums() returned no tensor through which auxiliary_loss() depends on the trained "
                "parameters; compute one from the output of the model, without detach() or torch.no_grad()"
            )
        attached: Tensor = _AddGradients.apply(loss, self, names, *(sums[name] for name in names))
        return attached

    def report(self, named: NamedLossSums, items: Tensor | float) -> Tensor | float:
        """Add the losses × items of a micro-batch to those that the step reports, and return their sum."""
        if self.solved is None:
            return 0.0
        named.add_auxiliary({name: value * items for name, value in self.solved.named.items()})
        return self.solved.loss * items

    def check_names(self, names: frozenset[str]) -> None:
        """Raise TaskError if weights or names of losses do not match. names: those that loss() returned."""
        assert self.solved is not None
        if clashing := names & self.solved.named.keys():
            raise TaskError(f"loss() and auxiliary_loss() both return {min(clashing)!r}; rename one of them")
        check_weight_names(
            self.task,
            [*names, *self.solved.named],
            "neither loss() nor auxiliary_loss() returns; they return",
        )

    def _check_repeated(self, first: Sums, second: Sums) -> None:
        """Raise TaskError if the second pass of a micro-batch has other sums than the first."""
        for name, value in first.items() if self._checks else ():
            rtol = RTOL.get(value.dtype, COARSE_RTOL)
            if name not in second or not (
                is_fake(value) or is_close(second[name].double(), value.double(), rtol, equal_nan=True)
            ):
                raise TaskError(
                    f"batch_sums() has another value of {name!r} when the model repeats a micro-batch, which "
                    "auxiliary_loss() requires; keep what changes in buffers and draw random numbers only "
                    "from torch, or use microbatches=1"
                )

    @torch.enable_grad()
    def _solve(self) -> SolvedStep:
        """Return the loss of the global batch. A collective."""
        if self.data_ranks > 1:
            if not self._has_agreed:
                self._parts.check_equal_on_ranks(self.device, self.group)
                self._has_agreed = True
            whole = self._parts.reduce(self.device, self.group)
        else:
            whole = self._parts.whole()
        leaves = {name: value.requires_grad_() for name, value in whole.items()}
        loss, named = compute_auxiliary_loss(self.task, leaves)
        if not loss.requires_grad:
            raise TaskError(
                "auxiliary_loss() returned a number that does not depend on the sums; compute it from them, "
                "without detach() or item()"
            )
        with UserCode("the backward pass", self.task.auxiliary_loss):
            gradients = torch.autograd.grad(
                loss, list(leaves.values()), torch.full_like(loss, self._start), allow_unused=True
            )
        found = zip(leaves, gradients, strict=True)
        return SolvedStep(
            loss.detach(),
            {name: value.detach() for name, value in named.items()},
            {name: gradient for name, gradient in found if gradient is not None},
        )


class _AddGradients(torch.autograd.Function):
    """Passes a loss through, and adds the gradients of sums, which may become known only later."""

    @staticmethod
    def forward(
        context: Any, loss: Tensor, auxiliary: AuxiliaryLoss, names: list[str], *sums: Tensor
    ) -> Tensor:
        context.auxiliary, context.names = auxiliary, names
        context.metas = [(value.dtype, value.shape, value.device) for value in sums]
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        solved = context.auxiliary.solved
        if solved is None:
            raise RuntimeError("the backward pass began before the sums of all micro-batches were known")
        return (
            gradient,
            None,
            None,
            *(
                solved.gradients[name].to(dtype)
                if name in solved.gradients
                else torch.zeros(shape, dtype=dtype, device=device)
                for name, (dtype, shape, device) in zip(context.names, context.metas, strict=True)
            ),
        )

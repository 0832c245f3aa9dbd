"""Local SGD: each rank updates its weights alone, and the ranks average their weights every few steps.

Stich, Local SGD converges fast and communicates little, 2019. Lin et al., Don't use large mini-batches, use
local SGD, 2020: the start with averaged gradients (post-local SGD), and momentum that stays on its rank.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PlanError
from paceline.parallel.data_parallel.batch_norm import find_running_statistics, unsync_batch_norm
from paceline.parallel.data_parallel.ddp import release
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.training.checkpoint.state import collect_model_tensors, collect_state, rank_prefix
from paceline.training.optimization.gradient_norm import GradientNorm
from paceline.training.step.step import TrainingStep


@dataclass
class LocalSgd:
    """Averages weights over ranks. Call `before_step` and `after_step` around each step, on all ranks."""

    model: nn.Module  # not wrapped by DistributedDataParallel
    update: TrainingStep
    period: int
    switch: int  # steps with averaged gradients at the start
    _averaged: list[Any] = field(init=False)  # parameters and buffers; torch's function accepts both

    def __post_init__(self) -> None:
        if self.update.loss_scale is not None:
            raise PlanError(
                f"plan {self.update.plan} with fp16: each rank would need a separate loss scale; "
                "use bf16 or fp32"
            )
        self._averaged = [
            *self.update.params,
            *filter(torch.is_floating_point, find_running_statistics(self.model).values()),
        ]

    def before_step(self, step: int) -> None:
        """Prepare a step. `step`: steps done before it."""
        if step >= self.switch and not self.update.is_local:
            self._stop_averaging_gradients()

    def after_step(self, step: int) -> None:
        """Average the weights if it is time. `step`: steps done."""
        if step > self.switch and (step - self.switch) % self.period == 0:
            self.average_()

    def _stop_averaging_gradients(self) -> None:
        """Compute gradients, their norm and the statistics of BatchNorm from this rank's samples only."""
        release(self.update.model)
        if isinstance(self.update.model, DistributedDataParallel):
            self.update.model = self.update.model.module
        unsync_batch_norm(self.model)
        self.update.norm = GradientNorm(
            self.update.params, ResolvedPlan(), MeshCoordinate(0, 0, 0, 0), self.update.device
        )
        self.update.is_local = True

    def average_(self) -> None:
        """Average the weights.

        A collective. Only buffers of unknown meaning still differ between ranks afterwards.
        """
        with self.averaged():
            means = [tensor.data for tensor in self._averaged]
        with torch.no_grad():
            torch._foreach_copy_([tensor.data for tensor in self._averaged], means)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the averaged weights within this context. A collective."""
        # torch's PeriodicModelAverager skips parameters without a gradient, which may differ between ranks,
        # and counts steps from 0 in a resumed training. So only the function that it calls is used. That
        # function gives the parameters other tensors and does not change the former ones.
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        group = dist.group.WORLD
        assert group is not None
        own = [tensor.data for tensor in self._averaged]
        try:
            for dtype in {tensor.dtype for tensor in own}:
                average_parameters((tensor for tensor in self._averaged if tensor.dtype == dtype), group)
            yield
        finally:
            for tensor, data in zip(self._averaged, own, strict=True):
                tensor.data = data

    def state(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the state that all ranks have and the state of this rank, by names in a checkpoint.

        A collective.

        The averaged weights and the optimizer state of rank 0 have the names that other plans use. After each
        averaging rank 0 continues with the same combination.
        """
        own = collect_state(self.model, [self.update.optimizer])
        with self.averaged():
            means = {f"model/{name}": tensor for name, tensor in collect_model_tensors(self.model).items()}
        rank_state = {f"{rank_prefix(rank)}{name}": tensor for name, tensor in own.items()}
        if rank == 0:
            rank_state |= {name: tensor for name, tensor in own.items() if name not in means}
        return means, rank_state

    def notes(self) -> tuple[str, ...]:
        """Return what to report at the start."""
        until = f"gradients are averaged until step {self.switch}, then " if self.switch else ""
        every = "the weights are averaged" + (
            f" every {self.period} steps" if self.period > 1 else " after each step"
        )
        note = (
            f"local SGD: {until}each rank makes its own updates and {every}, "
            "which is not the update of one process"
        )
        statistics = (
            "BatchNorm takes its statistics from the samples of each rank then; "
            "the running ones are averaged with the weights"
        )
        return (note, *([statistics] if find_running_statistics(self.model) else []))


def build_local_sgd(model: nn.Module, update: TrainingStep, plan: ResolvedPlan) -> LocalSgd | None:
    """Return the local SGD of `plan`; None if it has none or one data rank."""
    if plan.period is None or plan.dp == 1:
        return None
    return LocalSgd(model, update, plan.period, plan.switch or 0)

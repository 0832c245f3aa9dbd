"""Local SGD: each rank makes its own updates, and every so many steps the weights are averaged.

Stich, Local SGD converges fast and communicates little, 2019; Lin et al., Don't use large mini-batches, use local SGD, 2020,
for the start with averaged gradients (post-local SGD) and for momentum, which stays with its rank.
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
from paceline.parallel.batch_norm import find_running_statistics, unsync_batch_norm
from paceline.parallel.ddp import release
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.training.checkpoint import save as checkpoint
from paceline.training.optimizer import Norm
from paceline.training.step import TrainingStep


@dataclass
class LocalSgd:
    """Call `before` and `after` around each step; all ranks must do so in step."""

    model: nn.Module  # under its own names
    update: TrainingStep
    period: int
    switch: int  # steps with averaged gradients before
    _averaged: list[Any] = field(init=False)  # parameters, and buffers that torch's function takes too

    def __post_init__(self) -> None:
        if self.update.loss_scale is not None:
            raise PlanError(
                f"plan {self.update.plan} with fp16: each rank would need a loss scale of its own; use bf16 or fp32"
            )
        self._averaged = [
            *self.update.params,
            *filter(torch.is_floating_point, find_running_statistics(self.model).values()),
        ]

    def before(self, step: int) -> None:
        """`step` steps are done."""
        if step >= self.switch and not self.update.alone:
            self._part()

    def after(self, step: int) -> None:
        """`step` steps are done."""
        if step > self.switch and (step - self.switch) % self.period == 0:
            self.average_()

    def _part(self) -> None:
        """From here on a rank's gradients, their norm and BatchNorm's statistics are its own."""
        release(self.update.model)
        if isinstance(self.update.model, DistributedDataParallel):
            self.update.model = self.update.model.module
        unsync_batch_norm(self.model)
        self.update.norm = Norm(
            self.update.params, ResolvedPlan(), MeshCoordinate(0, 0, 0, 0), self.update.device
        )
        self.update.alone = True

    def average_(self) -> None:
        """A collective: all ranks are equal afterwards, but for buffers whose meaning is not known."""
        with self.averaged():
            means = [tensor.data for tensor in self._averaged]
        with torch.no_grad():
            torch._foreach_copy_([tensor.data for tensor in self._averaged], means)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averaged weights for the time of this context, and then each rank's own again. A collective."""
        # PeriodicModelAverager leaves out parameters without a gradient, which may be others on each rank, and counts steps from 0
        # in a resumed training; so only what it calls is taken. It gives the parameters other tensors and leaves theirs alone.
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
        """By its name in a checkpoint, what all ranks have and what only this one has. A collective.

        Under the usual names there are the averaged weights, and the optimizer state of rank 0: that goes on with them after
        each averaging too.
        """
        own = checkpoint.tensors(self.model, self.update.optimizer)
        with self.averaged():
            means = {f"model/{name}": tensor for name, tensor in checkpoint.model_tensors(self.model).items()}
        mine = {f"{checkpoint.own(rank)}{name}": tensor for name, tensor in own.items()}
        if rank == 0:
            mine |= {name: tensor for name, tensor in own.items() if name not in means}
        return means, mine

    def notes(self) -> tuple[str, ...]:
        until = f"gradients are averaged until step {self.switch}, then " if self.switch else ""
        every = "the weights are averaged" + (
            f" every {self.period} steps" if self.period > 1 else " after each step"
        )
        note = f"local SGD: {until}each rank makes its own updates and {every}, which is not the update of one process"
        statistics = "BatchNorm takes its statistics from the samples of each rank then; the running ones are averaged with the weights"
        return (note, *([statistics] if find_running_statistics(self.model) else []))


def local_sgd(model: nn.Module, update: TrainingStep, plan: ResolvedPlan) -> LocalSgd | None:
    """What `plan`, whose data degree is said, has of it: nothing on one rank."""
    if plan.period is None or plan.dp == 1:
        return None
    return LocalSgd(model, update, plan.period, plan.switch or 0)

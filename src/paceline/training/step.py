"""One update: forward and backward over the micro-batches, the norm of the whole gradient, clipping, the optimizer."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data.loader import Batch
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.doctor.heartbeat import BACKWARD, FORWARD, UPDATE
from paceline.errors import TaskError
from paceline.parallel.forward import GlobalWeight, LocalWeight, autocast, compute_weighted_loss, forward
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.task import Task
from paceline.training.optimizer import Norm, OptimizerStep, combined, scale_
from paceline.training.step_metrics import LocalStepStats
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.parallel.pipeline.runner import Pipeline


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., Mixed precision training, 2018), decided by the norm of the whole
    gradient, so that all ranks agree. torch's GradScaler looks at each rank's shards alone."""

    scale: float = 65536.0
    good_steps: int = 0

    def is_finite(self, norm: Tensor) -> bool:
        return bool(norm.isfinite())

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == 2000:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass
class TrainingStep:
    """Call it with the micro-batches of a step. All that is not an argument of the call is the same for each step."""

    task: Task
    model: nn.Module  # as laid out
    optimizer: torch.optim.Optimizer
    params: Sequence[nn.Parameter]
    plan: ResolvedPlan
    place: MeshCoordinate  # of this rank
    device: torch.device
    precision: str
    clip: float | None
    seed: int
    pipeline: "Pipeline | None" = None  # runs forward and backward, where the plan has one
    observe: Callable[[str, int], None] | None = (
        None  # called with ("gradients", step) before each update, ("weights", step) after it
    )
    share: tuple[int, int] | None = (
        None  # samples of a micro-batch here and of the global batch, where ranks have unlike numbers
    )
    alone: bool = False  # the gradient is that of the mean over this rank's own items: local SGD
    base_lrs: list[float] = field(init=False)
    norm: Norm = field(init=False)
    loss_scale: LossScale | None = field(init=False)
    step_optimizer: OptimizerStep = field(init=False)
    around_loss: Callable[[], contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext
    )  # forward and backward run in it
    enter: Callable[[str], None] = lambda phase: None  # told of each phase that begins
    examine: Callable[[object, Batch, Tensor], None] | None = (
        None  # called with the first output, batch and loss, and never again
    )
    after_backward: list[Callable[[], None]] = field(
        default_factory=list
    )  # what the engines leave undone of the gradients

    def __post_init__(self) -> None:
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        own = [
            parameter
            for parameter in self.params
            if self.pipeline is None or id(parameter) not in self.pipeline.counted_elsewhere
        ]
        self.norm = Norm(own, self.plan, self.place, self.device)
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        self.step_optimizer = OptimizerStep(self.optimizer)

    @property
    def data_ranks(self) -> int:
        return self.plan.dp

    def __call__(self, batches: Sequence[Batch], step: int, lr_factor: float) -> LocalStepStats:
        with self.around_loss():
            losses, items, expected = self.backward(batches, step)
        for finish in self.after_backward:
            finish()
        self.enter(UPDATE)
        if self.observe is not None:
            self.observe("gradients", step)
        norm = self.update(lr_factor)
        if self.observe is not None:
            self.observe("weights", step)
        if self.alone:  # the squares of all ranks add up to their mean
            norm = (norm if isinstance(norm, Tensor) else combined(norm, self.device)) / math.sqrt(
                self.data_ranks
            )
        return (
            LocalStepStats(reduce(add, losses), sum(items), norm, expected)
            if self.counts
            else LocalStepStats(0.0, 0.0, norm, expected)
        )

    @property
    def counts(self) -> bool:
        """Of the ranks with the same samples, whether this is the one whose losses and metrics count."""
        return (self.place.cp, self.place.tp, self.place.pp) == (0, 0, self.plan.loss_pp_rank)

    def output(self, batch: Batch) -> object:
        """What the model makes of a batch; ELSEWHERE where another rank has the end of it."""
        if self.pipeline is not None:
            return self.pipeline.output(batch)
        with autocast(self.precision, self.device):
            return forward(self.task, self.model, batch)

    def backward(
        self, batches: Sequence[Batch], step: int
    ) -> tuple[list[Tensor], list[Tensor | float], float | None]:
        """Add up the gradients. Returns loss × items and items of each micro-batch here, and the items expected over all ranks."""
        weight: GlobalWeight | LocalWeight | None = None
        if type(self.task).weights is not Task.weights:
            own = LocalWeight(self.task, batches, self.data_ranks) if self.alone else None
            weight = own or GlobalWeight(self.task, batches, self.place.is_first_of_data)
        if self.pipeline is not None:
            self.enter(FORWARD)
            assert not isinstance(weight, LocalWeight)
            return self.pipeline.backward(batches, step, weight, self._share_of, self.examine)
        losses: list[Tensor] = []
        items: list[Tensor | float] = []
        whole: Tensor | float | None = None
        for index, batch in enumerate(batches):
            self.enter(FORWARD)
            seed_torch(derive_seed(self.seed, "model", step, index, *self.place.stream), self.device)
            with self._sync_if(index == len(batches) - 1):
                with autocast(self.precision, self.device):
                    loss, items_here = compute_weighted_loss(self.task, self.model, batch, self.examine)
                if whole is None:
                    whole = (
                        weight.result()
                        if weight is not None
                        else self._expected(float(items_here), len(batches))
                    )
                self.enter(BACKWARD)
                share = self._share_of(loss, whole)
                with UserCode("the backward pass", self.task.loss):
                    loss.backward(share)
            losses.append(loss.detach())
            items.append(items_here)
        return losses, items, whole if isinstance(whole, float) else None

    def _expected(self, items_here: float, micro_batches: int) -> float:
        """Items of the global batch, where a micro-batch here has so many."""
        if self.share is None:
            return items_here * micro_batches * self.data_ranks
        here, everywhere = self.share
        return items_here * everywhere / here  # exact, whatever the shares

    def _share_of(self, loss: Tensor, whole: Tensor | float) -> Tensor:
        """What a rank's loss × items counts for in the mean over `whole` items, as the gradient to start backward with."""
        if isinstance(whole, float) and not whole:
            raise TaskError(
                "loss() returned no items, of which there is no mean; return one or more for each sample"
            )
        share = self.data_ranks / whole  # the engines average over the data ranks
        if self.loss_scale is not None:
            share = share * self.loss_scale.scale
        return share.to(loss.dtype) if isinstance(share, Tensor) else torch.full_like(loss, share)

    @torch.no_grad()
    def update(self, lr_factor: float) -> Tensor | list[Tensor]:
        """Clip, step and drop the gradients. Returns this rank's part of the norm of the whole gradient, or the norms that make it up."""
        norm: Tensor | list[Tensor]
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * lr_factor
        if self.clip is None and self.loss_scale is None:
            norm = self.norm.here()
            self._step()
        else:
            whole = self.norm.whole()
            by = torch.ones_like(whole)
            if self.loss_scale is not None:
                by = by / self.loss_scale.scale
            if self.clip is not None:
                by = by * (self.clip / (whole * by + 1e-6)).clamp(max=1.0)
            finite = self.loss_scale is None or self.loss_scale.is_finite(whole)
            if finite:
                scale_(self.params, by)
                self._step()
            norm = []
            if self.alone or self.place == MeshCoordinate(0, 0, 0, 0):
                norm = whole / self.loss_scale.scale if self.loss_scale is not None else whole
            if self.loss_scale is not None:
                self.loss_scale.update(finite)
        for parameter in self.params:
            parameter.grad = None
        return norm

    def _step(self) -> None:
        with UserCode("the step of the optimizer", self.task.optimizer):
            self.step_optimizer()

    def _sync_if(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel once a step, with the last micro-batch."""
        if isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext() if last else self.model.no_sync()
        set_sync = getattr(self.model, "set_requires_gradient_sync", None)
        if set_sync is not None:  # FSDPModule, which takes 0.7 s to import
            set_sync(last)
        return contextlib.nullcontext()

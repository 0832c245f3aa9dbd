"""The updates of a task in a step: several passes, each with the optimizers of its parameters."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data.samples import Batch
from paceline.distributed.rng import derive_seed
from paceline.doctor.heartbeat import UPDATE
from paceline.errors import SpecError
from paceline.parallel.data_parallel.ddp import release, replicate
from paceline.parallel.data_parallel.fsdp import drop_gathered
from paceline.spec import Schedule
from paceline.task import Task
from paceline.training.frozen import frozen
from paceline.training.optimization.gradient_norm import combine_norms
from paceline.training.optimization.schedule import check_schedule, compute_lr_factor, tokens_per_sample
from paceline.training.step.ddp_warmup import warm_up_ddp
from paceline.training.step.loss_scale import LossScale
from paceline.training.step.step import TrainingStep
from paceline.training.step.step_metrics import LocalStepStats
from paceline.updates import Update


@dataclass
class UpdatePass:
    """One forward and backward pass, and the updates that it serves: several if they share the task's loss.

    others: trained parameters of the model that none of the updates has.
    """

    updates: Sequence[Update]
    steps: Sequence[TrainingStep]  # of the updates; the first computes the gradients of all
    others: Sequence[nn.Parameter]
    num_waiting: int = 0  # parameters that DDP does not average, as their update has not started

    @property
    def name(self) -> str:
        return self.updates[0].name

    def next_due(self, step: int) -> int:
        """Return the first step in which it runs, `step` or a later one."""
        return min(update.next_due(step) for update in self.updates)

    @property
    def losses_name(self) -> str:
        """The name of its losses; "": those of the task itself."""
        return self.name if self.updates[0].loss is not None else ""

    @property
    def params(self) -> list[nn.Parameter]:
        return [parameter for step in self.steps for parameter in step.params]

    def find_waiting(self, step: int) -> list[nn.Parameter]:
        """Return the parameters of updates that start after `step` steps."""
        return [
            parameter
            for update, of_update in zip(self.updates, self.steps, strict=True)
            if step < update.start
            for parameter in of_update.params
        ]

    def frozen_others(self, step: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context without gradients of the other parameters.

        step: steps done before, to freeze parameters of updates that start later, too.
        """
        return frozen([*self.others, *(self.find_waiting(step) if step is not None else [])])


@dataclass
class UpdateSequence:
    """A step of several updates. Call it in place of a `TrainingStep`.

    All updates see the same batch; each repetition has its own random numbers. Each pass computes with the
    weights that the passes before it have changed.

    whole_model: as the plan distributes it, without DistributedDataParallel.
    """

    whole_model: nn.Module
    passes: Sequence[UpdatePass]
    seed: int
    device: torch.device
    is_sharded: bool  # by `fully_shard`
    task: Task | None = None
    batch: int = 0
    samples: int = 0  # of the training
    epoch_samples: int = 1
    schedules: Mapping[str, Schedule] = field(default_factory=dict)  # of updates that have one, in samples
    # As in TrainingStep, but with ("gradients", step) after all updates; with ("update", step) before each.
    observe: Callable[[str, int], None] | None = None
    # Called with ("gradients", step) before the update of each pass, and with ("weights", step) after it.
    observe_pass: Callable[[str, int], None] | None = None
    on_phase: Callable[[str], None] = lambda phase: None
    after_update: list[Callable[[int], None]] = field(default_factory=list)
    loss_scale: LossScale | None = None  # none: fp16 is refused
    _observed: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _has_run: bool = False  # any pass

    @property
    def steps(self) -> list[TrainingStep]:
        """The steps of all updates."""
        return [step for of_pass in self.passes for step in of_pass.steps]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [step.optimizer for step in self.steps]

    @property
    def model(self) -> nn.Module:
        """The model that the first pass calls."""
        return self.passes[0].steps[0].model

    @property
    def period(self) -> int:
        """Number of steps after which the same updates run again."""
        return math.lcm(*(update.every for update in self._updates))

    @property
    def first_whole_step(self) -> int:
        """The first step in which all updates run, as the steps done before."""
        period, start = self.period, max(update.start for update in self._updates)
        return start + -(start + 1) % period

    @property
    def _updates(self) -> list[Update]:
        return [update for of_pass in self.passes for update in of_pass.updates]

    def lr_at(self, step: int, lr_factor: float) -> float:
        """Return the learning rate of the first update in a step."""
        first = self.passes[0]
        return first.steps[0].base_lrs[0] * self._lr_factor(first.updates[0], step, lr_factor)

    def set_phases(self, on_phase: Callable[[str], None]) -> None:
        """Let `on_phase` be called at the begin of each phase of each pass."""
        self.on_phase = on_phase
        for step in self.steps:
            step.on_phase = on_phase

    def set_length(self, task: Task, batch: int, epoch_samples: int, total_samples: int) -> None:
        """Resolve the schedules of the updates. Raises SpecError and TaskError.

        batch: samples of a step. total_samples: of the training.
        """
        self.task, self.batch, self.samples = task, batch, total_samples
        self.epoch_samples = epoch_samples
        self.schedules = {
            update.name: update.schedule.in_samples(batch, epoch_samples, tokens_per_sample(task))
            for update in self._updates
            if update.schedule is not None
        }
        for name, schedule in self.schedules.items():
            check_schedule(schedule, total_samples, task)
            if schedule.name == "plateau":
                raise SpecError(
                    f"Update {name} has the schedule plateau, which follows the metric of a whole training; "
                    "set it in the request, with --schedule plateau"
                )

    def replicate(self) -> None:
        """Let torch's DDP average the gradients of each pass. A collective."""
        for of_pass in self.passes:
            with of_pass.frozen_others():  # DDP averages what is trained when it is built
                of_pass.steps[0].model = replicate(self.whole_model)

    def warm_up(self, batch: Batch, step: int) -> None:
        """Prepare DDP, if it is used, for the first step. A collective. `step`: steps done before."""
        for of_pass in self.passes:
            if of_pass.find_waiting(of_pass.next_due(step)):
                continue  # DDP is built again when the pass runs
            lead = of_pass.steps[0]
            with of_pass.frozen_others():
                lead.model = warm_up_ddp(lead, batch)

    def release(self) -> None:
        """Delete DDP's references to the process group."""
        for step in self.steps:
            release(step.model)

    def __call__(self, batches: Sequence[Batch], step: int, lr_factor: float) -> LocalStepStats:
        """Run the passes that are due on the micro-batches of a step. `step`: steps done before."""
        parts: dict[str, LocalStepStats] = {}
        for of_pass in self.passes:
            due = [update.is_due(step) for update in of_pass.updates]
            if any(due):
                for repetition in range(of_pass.updates[0].repeat):
                    parts[of_pass.losses_name] = self._run(of_pass, due, batches, step, repetition, lr_factor)
        for change in self.after_update:
            change(step + 1)
        if self.observe is not None:
            self._show_gradients(step)
            self.observe("weights", step)
        norms = [self._norm(part.norm) for part in parts.values()]
        return LocalStepStats(0.0, 0.0, combine_norms(norms, self.device), None, passes=parts)

    def _run(
        self,
        of_pass: UpdatePass,
        due: Sequence[bool],
        batches: Sequence[Batch],
        step: int,
        repetition: int,
        lr_factor: float,
    ) -> LocalStepStats:
        lead = of_pass.steps[0]
        lead.seed = derive_seed(self.seed, "update", of_pass.name, repetition)
        with self._frozen_others(of_pass, batches[0], step):
            losses, items, expected = lead.compute_gradients(batches, step)
        late = [
            parameter
            for of_update, is_due in zip(of_pass.steps, due, strict=True)
            if not is_due
            for parameter in of_update.params
        ]
        for parameter in [*of_pass.others, *late]:
            parameter.grad = None
        self.on_phase(UPDATE)
        if self.observe is not None:
            self.observe("update", step)
            for parameter in of_pass.params:
                if parameter.grad is not None:
                    self._observed[parameter] = parameter.grad.clone()  # clipping changes it
        if self.observe_pass is not None:
            self.observe_pass("gradients", step)
        norms = [
            self._norm(of_update.update(self._lr_factor(update, step, lr_factor), step))
            for update, of_update, is_due in zip(of_pass.updates, of_pass.steps, due, strict=True)
            if is_due
        ]
        if self.is_sharded:
            drop_gathered(self.whole_model)
        if self.observe_pass is not None:
            self.observe_pass("weights", step)
        return lead.make_stats(losses, items, expected, combine_norms(norms, self.device))

    def _frozen_others(
        self, of_pass: UpdatePass, batch: Batch, step: int
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parameters are frozen that no update of a pass changes."""
        has_run, self._has_run = self._has_run, True
        if not self.is_sharded:
            self._set_up_ddp(of_pass, batch, step)
            return of_pass.frozen_others(step)
        if not has_run:
            # torch 2.13: in the first pass `fully_shard` fixes the data type of the gradients of a unit, and
            # the units' parameters are tracked. Gradients of other passes are computed and dropped once.
            return contextlib.nullcontext()
        drop_gathered(self.whole_model)  # parameters are frozen when they are gathered
        return of_pass.frozen_others(step)

    def _set_up_ddp(self, of_pass: UpdatePass, batch: Batch, step: int) -> None:
        """Let DDP, if it is used, average the gradients of the updates that have started. A collective."""
        lead, waiting = of_pass.steps[0], len(of_pass.find_waiting(step))
        if not isinstance(lead.model, DistributedDataParallel) or of_pass.num_waiting == waiting:
            return
        of_pass.num_waiting = waiting
        with of_pass.frozen_others(step):  # DDP averages what is trained when it is built
            release(lead.model)
            lead.model = replicate(self.whole_model)
            lead.model = warm_up_ddp(lead, batch)

    def _show_gradients(self, step: int) -> None:
        """Call the observer with the gradients of all updates of a step, of the last repetition of each."""
        assert self.observe is not None
        for parameter, gradient in self._observed.items():
            parameter.grad = gradient
        self.observe("gradients", step)
        for parameter in self._observed:
            parameter.grad = None
        self._observed.clear()

    def _lr_factor(self, update: Update, step: int, lr_factor: float) -> float:
        schedule = self.schedules.get(update.name)
        return (
            compute_lr_factor(
                schedule,
                step * self.batch,
                self.samples,
                self.task,
                step,
                step * self.batch // self.epoch_samples,
            )
            if schedule is not None
            else lr_factor
        )

    def _norm(self, norm: Tensor | list[Tensor]) -> Tensor:
        return norm.double() if isinstance(norm, Tensor) else combine_norms(norm, self.device)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without DistributedDataParallel, which is deleted."""
    if not isinstance(model, DistributedDataParallel):
        return model
    release(model)
    whole: nn.Module = model.module
    return whole

"""What the training loop runs on: the context of a rank, and a distributed model with its step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.batch_slices import RankBatchSlice
from paceline.distributed.world import World
from paceline.parallel.data_parallel.buffer_comparison import BufferComparison
from paceline.parallel.data_parallel.ddp import release
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checkpoint.state import collect_state
from paceline.training.optimization.batches import changing_batches
from paceline.training.step.local_sgd import LocalSgd
from paceline.training.step.step import TrainingStep
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.step.weight_operations import WeightOperations

if TYPE_CHECKING:
    from paceline.training.parameter_server.coordinator import Coordinator


def slice_batch(spec: Spec, plan: ResolvedPlan, world: World) -> RankBatchSlice:
    """Return the samples of each batch that a rank trains on."""
    place = plan.place(world.rank)
    return RankBatchSlice(spec.batch, plan.microbatches, place.dp, plan.dp, changing_batches(spec))


@dataclass(frozen=True)
class RankContext:
    """What this rank trains, under which plan, and where."""

    spec: Spec
    task: Task
    plan: ResolvedPlan
    requested_plan: str  # in the user's words
    world: World
    device: torch.device
    run: RunFolder | None  # where checkpoints go; None: none are written
    ranks: int  # that were started; a parameter server has more than `world`
    deadline: float | None = None  # when max_time is over, by time.monotonic

    @property
    def batch_slice(self) -> RankBatchSlice:
        """The samples of each batch that this rank trains on."""
        return slice_batch(self.spec, self.plan, self.world)


@dataclass(frozen=True)
class PreparedTraining:
    """A model distributed by a plan, and the step that trains it."""

    model: nn.Module  # not wrapped, so that its parameters have the names of the task's model
    step: TrainingStep  # of this process
    # What the loop calls for a step: `step`, or the updates of the task, or on the first parameter server its
    # coordinator.
    update: TrainingStep | UpdateSequence | Coordinator
    notes: tuple[str, ...]
    local: LocalSgd | None = None
    servers: Coordinator | None = None
    group: dist.ProcessGroup | None = None  # of the ranks that hold the model; None: all
    modules: str = ""  # of the model, as checkpoint.identity describes them
    lr_group: str = ""  # as in the event Started
    operations: WeightOperations | None = None  # None: of a parameter server
    comparison: BufferComparison | None = None  # of undeclared buffers; None: ranks cannot differ

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, each of different parameters."""
        update = self.update
        return update.optimizers if isinstance(update, UpdateSequence) else [update.optimizer]

    @property
    def saved_elsewhere(self) -> frozenset[str]:
        """Names of parameters that another pipeline stage writes to checkpoints."""
        return self.step.pipeline.saved_elsewhere if self.step.pipeline is not None else frozenset()

    def release(self) -> None:
        """Delete the references of DDP to the process group. Call it when the training ends."""
        if isinstance(self.update, UpdateSequence):
            self.update.release()
        release(self.step.model)

    def whole_model(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model of each rank has the weights that the training reached.

        A collective.

        Local SGD averages the weights of its ranks; parameter servers send theirs. The task may have an
        exponential moving average.
        """
        if self.servers is not None:
            self.servers.gather_()
        if self.local is not None and self.local.update.is_local:
            return self.local.averaged()
        return self.operations.averaged() if self.operations is not None else contextlib.nullcontext()

    def state(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the state that other ranks may have too, and the state of this rank alone (local SGD).

        A collective.

        The keys are the names of the tensors in a checkpoint.
        """
        if self.servers is not None:
            return self.servers.state(), {}
        if self.local is not None and self.local.update.is_local:
            return self.local.state(rank)
        elsewhere = self.saved_elsewhere
        averages = self.operations.state(elsewhere) if self.operations is not None else {}
        return collect_state(self.model, self.optimizers, elsewhere) | averages, {}

"""From a request to what the loop runs on: the data, the model as it is laid out, the state that a checkpoint left."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import CheckpointError, DataError, PlanError
from paceline.launch.world import World
from paceline.plan.plan import Plan
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task
from paceline.training import checkpoint
from paceline.training.batch_norm import over_all_ranks
from paceline.training.data import Samples, open_dataset
from paceline.training.local_sgd import LocalSgd, local_sgd
from paceline.training.optim import make_optimizer
from paceline.training.parallelize import check_splits, parallelize
from paceline.training.shards import is_here
from paceline.training.step import Step
from paceline.training.weights import fill_, record

if TYPE_CHECKING:
    from paceline.training.server import Coordinator

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Data:
    training: Samples
    validation: Samples | None
    samples: int  # of the training split


def open_data(spec: Spec, task: Task, world: World) -> Data:
    """Both splits, the same on all ranks. Raises DataError where they are not, PlanError for more ranks than samples."""
    train, validation = open_dataset(task, "train"), open_dataset(task, "validation")
    assert train is not None
    lengths = {"train": len(train), "validation": len(validation) if validation is not None else 0}
    everywhere = [lengths] * world.size
    if world.size > 1:
        dist.all_gather_object(everywhere, lengths)
    for rank, there in enumerate(everywhere):
        for split, first in everywhere[0].items():
            if there[split] != first:
                raise DataError(
                    f"dataset({split!r}) has {first} samples on rank 0 and {there[split]} on rank {rank}; "
                    "every rank must see the whole dataset, Paceline splits it"
                )
    if world.size > len(train):
        raise PlanError(f"{world.size} ranks for {len(train)} training samples; use at most --ranks {len(train)}")
    floats = torch.float64 if spec.precision == "fp64" else None
    return Data(
        training=Samples(train, "train", spec.seed, floats),
        validation=Samples(validation, "validation", spec.seed, floats) if validation is not None else None,
        samples=len(train),
    )


@dataclass(frozen=True)
class Laid:
    """A model as a plan lays it out, and the step that trains it."""

    model: nn.Module  # under its own names
    update: "Step | Coordinator"
    notes: tuple[str, ...]
    local: LocalSgd | None = None
    servers: "Coordinator | None" = None
    group: dist.ProcessGroup | None = None  # of the ranks that hold the model; None: all

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """For its time the model is the one that the training came to, on all ranks. A collective."""
        if self.servers is not None:
            self.servers.gather_()
        return self.local.averaged() if self.local is not None and self.local.update.alone else contextlib.nullcontext()

    def state(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By its name in a checkpoint, what other ranks may have too, and what only this one has: local SGD. A collective."""
        if self.servers is not None:
            return self.servers.state(), {}
        if self.local is not None and self.local.update.alone:
            return self.local.state(rank)
        return checkpoint.tensors(self.model, self.update.optimizer), {}


def lay_out(spec: Spec, plan: Plan, world: World, task: Task, device: torch.device) -> Laid:
    """`plan` has its data degree said."""
    axes = {"tp": plan.tp == 1, "pp": plan.pp == 1, "cp": plan.cp == 1}
    if missing := [what for what, built in axes.items() if not built]:
        raise PlanError(f"plan {plan}: {missing[0]} is not built yet")
    model, weights, recorded = record(task.model, spec.seed)
    if spec.precision == "fp64":
        model._apply(lambda tensor: tensor.to(WIDER.get(tensor.dtype)))
    if world.size > 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        model = over_all_ranks(model, device)
    pretrained = task.pretrained()

    def fill(laid_out: nn.Module) -> None:
        fill_(laid_out, weights, device, Path(pretrained) if pretrained is not None else None)

    called = parallelize(model, task.layout(), plan, device, fill, spec.compile)
    optimizer = make_optimizer(task, spec.optimizer, plan, model)
    check_splits(plan, optimizer)
    update = Step(
        task=task,
        model=called,
        optimizer=optimizer,
        params=[parameter for parameter in model.parameters() if parameter.requires_grad and is_here(parameter)],
        plan=plan,
        place=plan.place(world.rank),
        device=device,
        precision=spec.precision,
        clip=spec.optimizer.clip,
        seed=spec.seed,
    )
    whole = "the model's constructor cannot be recorded, so each rank builds it whole before it keeps its share (docs/tasks.md)"
    local = local_sgd(model, update, plan)
    return Laid(model, update, (*(() if recorded else (whole,)), *(local.notes() if local is not None else ())), local)


@dataclass(frozen=True)
class Resumed:
    step: int  # 0 where there was no checkpoint
    best: float | None  # score of the best checkpoint, lower being better
    notes: tuple[str, ...]


def resume(spec: Spec, world: World, run: RunFolder, laid: Laid, samples: int) -> Resumed:
    """Load the last whole checkpoint of `run`, if there is one. Raises CheckpointError when it is of another training."""
    path, index, notes = checkpoint.last_good(run, world.rank, world.size)
    if world.rank == 0:
        checkpoint.set_aside(run, index.step if index is not None else 0)
    if path is None or index is None:
        return Resumed(0, None, tuple(notes))
    checkpoint.check_same_model(path, index, spec.task, spec.set, laid.model)
    for what, then, now in (
        ("batch", index.samples // index.step, spec.batch),
        ("seed", index.seed, spec.seed),
        ("training samples", index.epoch_samples, samples),
    ):
        if then != now:
            raise CheckpointError(f"{path} was made with {what} {then}, got {now}; the order of samples counts on it: start a new run")
    own = laid.local is not None and index.own and index.ranks == world.size
    checkpoint.load_(path, laid.model, laid.update.optimizer, checkpoint.own(world.rank) if own else "", laid.group)
    if index.own and not own:
        notes.append(f"{path} is of local SGD on {index.ranks} ranks: this goes on from their mean, with the optimizer state of rank 0")
    scale = laid.update.loss_scale
    if scale is not None and index.loss_scale is not None:
        scale.scale, scale.good_steps = index.loss_scale["scale"], int(index.loss_scale["good_steps"])
    return Resumed(index.step, checkpoint.best_score(run, spec.save.best), tuple(notes))

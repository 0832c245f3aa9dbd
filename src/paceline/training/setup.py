"""From a request to what the loop runs on: the data, the model as it is laid out, the state that a checkpoint left."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.fake import example_batch
from paceline.data.loader import Batch, RankBatchSlice, Samples, check_batch, open_dataset
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.distributed.world import World
from paceline.errors import CheckpointError, PlanError
from paceline.parallel.apply import check_elementwise, parallelize
from paceline.parallel.batch_norm import average_, find_running_statistics, sync_batch_norm
from paceline.parallel.compile import check_compilable
from paceline.parallel.fsdp import average_scalars_
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.training.checkpoint import save as checkpoint
from paceline.training.checkpoint.identity import changes, identity, modules_of
from paceline.training.init.deferred_init import Weights, fill_, record
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.pretrained import find_pretrained_names
from paceline.training.local_sgd import LocalSgd, local_sgd
from paceline.training.optimizer import (
    OptimizerReport,
    check_sparse,
    coalesce_,
    make_optimizer,
    sparse_parameters,
)
from paceline.training.step import TrainingStep
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.parallel.pipeline.tracer import ForwardTrace, StandInModel
    from paceline.parallel.shard_units import ShardUnits
    from paceline.parallel.tensor.apply import Splits
    from paceline.training.parameter_server.coordinator import Coordinator

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class TrainingData:
    training: Samples
    validation: Samples | None
    samples: int  # of the training split

    @property
    def lengths(self) -> dict[str, int]:
        """Samples of each split."""
        return {
            "train": self.samples,
            "validation": self.validation.count if self.validation is not None else 0,
        }


def open_data(spec: Spec, task: Task) -> TrainingData:
    """Both splits. Raises DataError."""
    train, validation = open_dataset(task, "train"), open_dataset(task, "validation")
    assert train is not None
    floats = torch.float64 if spec.precision == "fp64" else None
    training = Samples(train, "train", spec.seed, floats)
    return TrainingData(
        training=training,
        validation=Samples(validation, "validation", spec.seed, floats) if validation is not None else None,
        samples=training.count,
    )


@dataclass(frozen=True)
class ModelAnalysis:
    """A model on the meta device, and what a plan takes to know of it before it is laid out: the same on every rank."""

    model: nn.Module
    weights: Weights
    recorded: bool  # whether its constructor could be
    batch: Batch | None = None
    splits: Splits | None = None
    parts: StandInModel | None = None  # a copy, for recordings
    recording: ForwardTrace | None = None  # of a forward pass in training
    units: ShardUnits | None = None  # what `fully_shard` gathers on its own

    def again(self) -> ModelAnalysis:
        """The same, of another object: to lay a model out leaves nothing of what it was."""
        return replace(self, model=copy.deepcopy(self.model))


def analyze_model(
    spec: Spec, plan: ResolvedPlan, task: Task, device: torch.device, training: Samples | None = None
) -> ModelAnalysis:
    """Raises the PlanError or TaskError of what cannot be. `plan` has its data degree said; `training`: the split, if it is open."""
    if spec.compile:
        check_compilable(plan)
    studied = build(spec, task)
    model = studied.model
    check_sparse(plan, model)
    if plan.cp > 1:
        from paceline.parallel.context import apply as context

        context.check_context_parallel(task, spec, plan, model)
    cuts = plan.zero >= 2 or (plan.splits_model and plan.data_ranks > 1)
    if not plan.splits_model and not cuts:
        return studied
    batch = example_batch(spec, task, plan, training)
    units = None
    if cuts:
        from paceline.parallel.shard_units import find_shard_units

        units = find_shard_units(model, task, batch, spec.seed)
    splits = parts = recording = None
    with UserCode("the forward pass without values", task.model):
        if plan.tp > 1:
            from paceline.parallel.tensor.apply import find_splits

            splits = find_splits(model, task, batch, plan)
        if plan.pp > 1:
            from paceline.parallel.pipeline import tracer

            parts = tracer.StandInModel(model, read_layout(task), device)
            recording = parts.trace_step(task, batch, spec.precision)
            if splits is not None:
                recording.bar_tensor_parallel_pairs(splits.styles)
    return replace(studied, batch=batch, splits=splits, parts=parts, recording=recording, units=units)


def validate_plan(spec: Spec, plan: ResolvedPlan, task: Task) -> None:
    """Raise the PlanError or TaskError that `build_training` would, without any rank."""
    studied = analyze_model(spec, plan, task, torch.device("cpu"))
    if studied.recording is not None:
        from paceline.parallel.pipeline import runner as pipeline

        pipeline.check(plan, task, studied.model, studied.recording)


def check_enough(samples: int, plan: ResolvedPlan, batch: int) -> tuple[str, ...]:
    """Raise PlanError for a data rank without samples, or a batch far beyond them.

    Returns what is to be said of a batch that holds samples several times."""
    if plan.dp > samples:
        most = samples * plan.cp * plan.tp * plan.pp + plan.num_servers
        raise PlanError(
            f"{plan.dp} {plan.batch_sharers} for {samples} training samples; use at most --ranks {most}"
        )
    check_batch(batch, samples)
    if batch > samples:
        return (
            f"batch {batch:,} is more than the {samples:,} training samples: each step has samples several times",
        )
    return ()


@dataclass(frozen=True)
class PreparedTraining:
    """A model as a plan lays it out, and the step that trains it."""

    model: nn.Module  # under its own names
    step: TrainingStep  # of this process
    update: (
        TrainingStep | Coordinator
    )  # what the loop calls: the same, or on the first of parameter servers what stands for all of them
    notes: tuple[str, ...]
    local: LocalSgd | None = None
    servers: Coordinator | None = None
    group: dist.ProcessGroup | None = None  # of the ranks that hold the model; None: all
    modules: str = ""  # of the model, in words
    lr_group: str = ""  # as in Started

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """For its time the model is the one that the training came to, on all ranks. A collective."""
        if self.servers is not None:
            self.servers.gather_()
        return (
            self.local.averaged()
            if self.local is not None and self.local.update.alone
            else contextlib.nullcontext()
        )

    def state(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By its name in a checkpoint, what other ranks may have too, and what only this one has: local SGD. A collective."""
        if self.servers is not None:
            return self.servers.state(), {}
        if self.local is not None and self.local.update.alone:
            return self.local.state(rank)
        elsewhere = self.step.pipeline.elsewhere if self.step.pipeline is not None else ()
        return checkpoint.tensors(self.model, self.step.optimizer, elsewhere), {}


def build_training(
    spec: Spec,
    plan: ResolvedPlan,
    world: World,
    task: Task,
    device: torch.device,
    fill_with: Callable[[nn.Module], None] | None = None,
    training: Samples | None = None,
    studied: ModelAnalysis | None = None,
) -> PreparedTraining:
    """`fill_with` gives the model, laid out on the meta device, other values than its initial ones.
    `training`: the split, if it is open. `studied`: if it is; its model becomes the one that is laid out."""
    studied = studied if studied is not None else analyze_model(spec, plan, task, device, training)
    model, weights, splits, batch = studied.model, studied.weights, studied.splits, studied.batch
    modules = modules_of(model)
    pretrained = pretrained_of(task) if fill_with is None else None
    if fill_with is None:
        weights.check_written(
            named_tensors(model).keys() - find_pretrained_names(pretrained, model)
        )  # on all ranks, whichever holds it
    notes: tuple[str, ...] = () if studied.recorded else (UNRECORDED,)
    if splits is not None:
        notes += splits.notes
    mesh = build_mesh(plan, device) if plan.splits_model or plan.zero >= 2 else None
    pipeline = None
    if plan.pp > 1:
        from paceline.parallel.pipeline.pass_traces import TracedModel
        from paceline.parallel.pipeline.runner import Pipeline  # imports torch's pipelining, 1 s
        from paceline.parallel.pipeline.stage import PipelineRank

        assert mesh is not None
        assert studied.parts is not None
        assert studied.recording is not None
        pipeline = Pipeline(
            TracedModel(task, model, studied.parts, studied.recording, batch, spec.precision, splits),
            PipelineRank(plan, mesh, plan.place(world.rank), device),
            spec.seed,
        )
    statistics = find_running_statistics(model) if plan.ranks_per_stage > 1 else {}
    group = _group_of_samples(plan, world.rank) if statistics else None
    if statistics and spec.batch_norm == "global":
        model = sync_batch_norm(model, device, group, alike=not plan.uneven)
    fill = partial(fill_, weights=weights, device=device, pretrained=pretrained)
    units = studied.units.names if studied.units is not None else None
    if pipeline is not None:
        pipeline.parallelize(fill_with or fill, spec.compile, units)
        called = model
    else:
        called = parallelize(
            model, read_layout(task), plan, device, fill_with or fill, spec.compile, mesh, splits, units
        )
    of_optimizer = OptimizerReport()
    optimizer = make_optimizer(task, spec.optimizer, plan, model, of_optimizer)
    notes += tuple(of_optimizer.notes)
    check_elementwise(plan, optimizer)
    update = TrainingStep(
        task=task,
        model=called,
        optimizer=optimizer,
        params=[
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and is_materialized(parameter)
        ],
        plan=plan,
        place=plan.place(world.rank),
        device=device,
        precision=spec.precision,
        clip=spec.optimizer.clip,
        seed=spec.seed,
        pipeline=pipeline,
        share=(_share_of(spec, plan, world), spec.batch) if plan.uneven else None,
    )
    if studied.units is not None and pipeline is None and mesh is not None:
        from paceline.parallel.skipped_units import SkippedUnits

        skipped = SkippedUnits(model, [model.get_submodule(name) for name in studied.units.names], device)
        if not studied.units.all_used:
            skipped.follow()
            update.after_backward.append(partial(skipped.drop_unused_, select_data_mesh(mesh)))
    if mesh is not None and plan.data_ranks > 1 and (whole := [p for p in update.params if not p.dim()]):
        update.after_backward.append(partial(average_scalars_, whole, select_data_mesh(mesh)))
    if sparse := list(sparse_parameters(model).values()):
        update.after_backward.append(partial(coalesce_, sparse))
    local = local_sgd(model, update, plan)
    if local is not None:
        notes += tuple(local.notes())
    if spec.batch_norm == "local" and statistics and local is None:
        own = [
            buffer
            for buffer in find_running_statistics(model).values()
            if buffer.is_floating_point() and is_materialized(buffer)
        ]
        update.after_backward.append(partial(average_, own, group))
        notes += (LOCAL_BATCH_NORM,)
    if splits is not None and mesh is not None:
        _split_step(update, model, splits, task, batch, mesh["tp"])
    return PreparedTraining(
        model, update, update, notes, local, modules=modules, lr_group=of_optimizer.lr_group
    )


def pretrained_of(task: Task) -> Path | None:
    """The file of initial weights that the user names."""
    with UserCode("pretrained()", task.pretrained):
        path = task.pretrained()
        return Path(path) if path is not None else None


def _share_of(spec: Spec, plan: ResolvedPlan, world: World) -> int:
    return RankBatchSlice(spec.batch, plan.microbatches, plan.place(world.rank).dp, plan.dp).share


def _group_of_samples(plan: ResolvedPlan, rank: int) -> dist.ProcessGroup | None:
    """The ranks that have other samples for the same part of the model; None: all. A collective."""
    if plan.dp == plan.ranks_per_stage and plan.pp == 1:
        return None
    members: dict[MeshCoordinate, list[int]] = {}
    for other in range(plan.ranks_per_stage * plan.pp):
        members.setdefault(replace(plan.place(other), dp=0), []).append(other)
    groups = {place: dist.new_group(ranks) for place, ranks in members.items()}
    return groups[replace(plan.place(rank), dp=0)]


UNRECORDED = "the model's constructor cannot be recorded, so each rank builds it whole before it keeps its share (docs/tasks.md)"

LOCAL_BATCH_NORM = (
    "BatchNorm takes its statistics from the samples of each rank (batch_norm=local), so ranks matter"
)


def _split_step(
    update: TrainingStep, model: nn.Module, splits: Splits, task: Task, batch: Batch, mesh: DeviceMesh
) -> None:
    """What else a step has to do where features are split."""
    from paceline.parallel.tensor.apply import sum_partial_gradients
    from paceline.parallel.tensor.vocab_parallel_loss import split_loss, try_split_loss

    if splits.partial:
        params = [
            parameter
            for name, parameter in model.named_parameters()
            if name in splits.partial and is_materialized(parameter)
        ]
        update.after_backward.append(partial(sum_partial_gradients, params, mesh.get_group()))
    if update.pipeline is None and try_split_loss(model, splits, task, batch, mesh):
        update.around_loss = split_loss


def build(spec: Spec, task: Task) -> ModelAnalysis:
    """The model, of which nothing more is known."""
    with UserCode("model()", task.model):
        model, weights, recorded = record(task.model, spec.seed)
    if spec.precision == "fp64":
        model._apply(lambda tensor: tensor.to(WIDER.get(tensor.dtype)))
    for (
        module
    ) in model.modules():  # what torch's first weight_norm left of its computation, which could not be copied
        computed = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        }
        module.__dict__.update({key: value.detach() for key, value in computed.items()})
    return ModelAnalysis(model, weights, recorded)


@dataclass(frozen=True)
class Resumed:
    step: int  # 0 where there was no checkpoint
    best: float | None  # score of the best checkpoint, lower being better
    notes: tuple[str, ...]
    evaluated: bool = True  # whether an evaluation that was due then is in the checkpoint


def resume(spec: Spec, world: World, run: RunFolder, laid: PreparedTraining, samples: int) -> Resumed:
    """Load the last whole checkpoint of `run`, if there is one. Raises CheckpointError when it is of another training."""
    path, index, notes = checkpoint.last_good(run, world.rank, world.size)
    if world.rank == 0:
        checkpoint.quarantine(run, index.step if index is not None else 0)
    if path is None or index is None:
        return Resumed(0, None, tuple(notes))
    checkpoint.check_same_model(path, index, spec.task, spec.set, laid.model)
    for what, then, now in (
        ("batch", index.samples // index.step, spec.batch),
        ("seed", index.seed, spec.seed),
        ("training samples", index.epoch_samples, samples),
    ):
        if then != now:
            raise CheckpointError(
                f"{path} was made with {what} {then}, got {now}; the order of samples counts on it: start a new run"
            )
    own = laid.local is not None and index.own and index.ranks == world.size
    checkpoint.load_(
        path, laid.model, laid.update.optimizer, checkpoint.own(world.rank) if own else "", laid.group
    )
    if index.own and not own:
        notes.append(
            f"{path} is of local SGD on {index.ranks} ranks: this goes on from their mean, with the optimizer state of rank 0"
        )
    if changed := changes(index.identity, identity(spec, laid.step.task, laid.modules, laid.step.optimizer)):
        notes.append(f"this training is another from step {index.step} on: {'; '.join(changed)}")
    scale = laid.update.loss_scale
    if scale is not None and index.loss_scale is not None:
        scale.scale, scale.good_steps = index.loss_scale["scale"], int(index.loss_scale["good_steps"])
    return Resumed(index.step, checkpoint.best_score(run, spec.save.best), tuple(notes), bool(index.metrics))

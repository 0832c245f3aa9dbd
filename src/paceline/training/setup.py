"""What the training loop runs on: the data, the distributed model, and the step that trains it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.cache.opening import Caches, open_caches
from paceline.data.loader import (
    RankBatchSlice,
    Samples,
    check_batch,
    choose_order,
    open_samples,
    open_training_samples,
)
from paceline.data.order import Order
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.distributed.world import World
from paceline.errors import DataError, PlanError
from paceline.parallel.apply import parallelize
from paceline.parallel.data_parallel.batch_norm import (
    average_,
    find_running_statistics,
    has_batch_norm,
    sync_batch_norm,
)
from paceline.parallel.data_parallel.buffer_comparison import BufferComparison
from paceline.parallel.data_parallel.ddp import release
from paceline.parallel.data_parallel.fsdp import average_scalars_
from paceline.parallel.data_parallel.inner_gradients import InnerGradients
from paceline.parallel.data_parallel.reduced_buffers import (
    NONE,
    BufferReducer,
    Reduction,
    describe_own_buffers,
    find_batch_norm_buffers,
    read_reductions,
)
from paceline.parallel.loss.auxiliary_loss import AuxiliaryLoss, has_auxiliary_loss
from paceline.parallel.loss.forward import has_global_loss
from paceline.parallel.loss.global_loss import BatchShares, GlobalLoss
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.run import RunFolder
from paceline.spec import Optimizer, Spec
from paceline.task import Task, read_layout
from paceline.training.checkpoint import save as checkpoint
from paceline.training.checkpoint.identity import describe_modules
from paceline.training.init.deferred_init import fill_
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.pretrained import PretrainedWeights
from paceline.training.model_facts.model_analysis import ModelAnalysis, analyze_model, find_pretrained
from paceline.training.optimization.adaptive_clipping import AdaptiveClipping
from paceline.training.optimization.batch_scaling import describe_scaling, lr_scale_factor, scale_optimizer
from paceline.training.optimization.batches import changing_batches
from paceline.training.optimization.optimizer import OptimizerReport, make_optimizer
from paceline.training.optimization.read_updates import assign_parameters, task_of
from paceline.training.optimization.sparse_gradients import coalesce_, find_sparse_parameters
from paceline.training.optimizers.param_groups import select_names
from paceline.training.step.local_sgd import LocalSgd, build_local_sgd
from paceline.training.step.step import TrainingStep
from paceline.training.step.update_sequence import UpdatePass, UpdateSequence, unwrap
from paceline.training.step.weight_operations import WeightOperations, read_operations
from paceline.updates import Update

if TYPE_CHECKING:
    from paceline.parallel.pipeline.runner import Pipeline
    from paceline.training.parameter_server.coordinator import Coordinator

UNRECORDED = (
    "the model's constructor cannot be recorded, so each rank builds it whole before it keeps its share "
    "(docs/tasks.md)"
)
LOCAL_BATCH_NORM = (
    "BatchNorm takes its statistics from the samples of each rank (batch_norm=local), so ranks matter"
)


@dataclass(frozen=True)
class TrainingData:
    """The splits of a task that a training reads."""

    training: Samples
    validation: Samples | None
    order: Order  # of the training split
    others: tuple[Samples, ...] = ()  # that are evaluated besides the validation split
    caches: Caches = field(default_factory=Caches)

    @property
    def samples(self) -> int:
        """Number of samples of an epoch."""
        return self.order.epoch_samples

    @property
    def evaluated(self) -> dict[str, Samples]:
        """The splits that are evaluated, by the prefix of their metrics."""
        validation = {} if self.validation is None else {"": self.validation}
        return validation | {f"{samples.split}/": samples for samples in self.others}

    @property
    def lengths(self) -> dict[str, int]:
        """Number of samples by split."""
        return {
            "train": self.samples,
            "validation": self.validation.count if self.validation is not None else 0,
            **{samples.split: samples.count for samples in self.others},
        }


def open_data(spec: Spec, task: Task, plan: ResolvedPlan | None = None) -> TrainingData:
    """Open both splits. Raises DataError. `plan`: what divides the batches, if it is known."""
    training = open_training_samples(task, spec, plan)
    return TrainingData(
        training=training,
        validation=open_samples(task, "validation", spec, plan),
        order=choose_order(training, spec),
        others=tuple(_open_split(spec, task, split, plan) for split in spec.evaluate_splits),
    )


@contextlib.contextmanager
def use_caches(data: TrainingData, spec: Spec, world: World) -> Iterator[TrainingData]:
    """Read the samples through caches in this context, if the request has them. A collective.

    Raises DataError if they cannot be cached.
    """
    job = [secrets.token_hex(16)]
    if spec.data.cache != "off" and dist.is_initialized():
        dist.broadcast_object_list(job, src=0)
    splits = [data.training, *data.evaluated.values()]
    with open_caches(splits, spec.data, world, job[0], spec.data.workers or 1) as caches:
        yield replace(data, caches=caches)


def _open_split(spec: Spec, task: Task, split: str, plan: ResolvedPlan | None) -> Samples:
    samples = open_samples(task, split, spec, plan)
    if samples is None:
        raise DataError(
            f"evaluate_splits has {split!r}, but {type(task).__name__}.dataset({split!r}) returned None; "
            "return its samples, or leave it out"
        )
    return samples


def check_sample_count(samples: int, plan: ResolvedPlan, batch: int) -> tuple[str, ...]:
    """Return a note if the batch is larger than the training split.

    Raises PlanError if a data rank would have no samples, or if the batch is far too large.
    """
    if plan.dp > samples:
        most = samples * plan.cp * plan.tp * plan.pp + plan.num_servers
        raise PlanError(
            f"{plan.dp} {plan.batch_sharers} for {samples} training samples; use at most --ranks {most}"
        )
    check_batch(batch, samples)
    if batch > samples:
        return (
            f"batch {batch:,} is more than the {samples:,} training samples: "
            "each step has samples several times",
        )
    return ()


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
        return _batch_slice(self.spec, self.plan, self.world)


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
        return checkpoint.collect_state(self.model, self.optimizers, elsewhere) | averages, {}


def build_training(
    spec: Spec,
    plan: ResolvedPlan,
    world: World,
    task: Task,
    device: torch.device,
    fill_with: Callable[[nn.Module], None] | None = None,
    training: Samples | None = None,
    analysis: ModelAnalysis | None = None,
) -> PreparedTraining:
    """Distribute the model of a task as `plan` says, and build the step that trains it. A collective.

    fill_with: gives the distributed model other values than its initial
    ones. `training`: the training split, if it is open already. `analysis`: of the model, if it is made
    already; its model is changed in place. Raises PlanError and TaskError.
    """
    analysis = analysis if analysis is not None else analyze_model(spec, plan, task, device, training)
    model, splits = analysis.model, analysis.splits
    modules = describe_modules(model)
    source = find_pretrained(task) if fill_with is None else None
    pretrained = PretrainedWeights(source, model) if source is not None else None
    if fill_with is None:  # checked for all tensors on all ranks, whichever rank will hold them
        loaded = pretrained.tensors.keys() if pretrained is not None else set()
        analysis.weights.check_written(named_tensors(model).keys() - loaded)
    fill = fill_with or partial(fill_, weights=analysis.weights, device=device, pretrained=pretrained)
    mesh = build_mesh(plan, device) if plan.splits_model or plan.zero >= 2 else None
    pipeline = _build_pipeline(spec, plan, world, task, device, analysis, mesh) if plan.pp > 1 else None
    has_statistics = plan.ranks_per_stage > 1 and (
        has_batch_norm(model) or bool(find_running_statistics(model))
    )
    reductions = read_reductions(read_layout(task), model)
    is_reduced = any(reduction != NONE for reduction in reductions.values())
    sums_samples = is_reduced or has_global_loss(task) or has_auxiliary_loss(task)
    has_group = has_statistics or (plan.dp > 1 and sums_samples)
    group = _group_along(plan, world.rank, "dp") if has_group else None
    if has_statistics and (spec.batch_norm == "global" or plan.cp > 1):
        # Ranks of cp may have slices of the same samples, of different lengths.
        axes = ["dp"] if spec.batch_norm == "global" else []
        over = _group_along(plan, world.rank, *axes, "cp") if plan.cp > 1 else group
        equal_counts = not plan.uneven and plan.cp == 1
        model = sync_batch_norm(model, device, over, equal_counts)
    units = analysis.units.names if analysis.units is not None else None
    called = model
    if pipeline is not None:
        pipeline.parallelize(fill, spec.compile, units)
    else:
        called = parallelize(model, read_layout(task), plan, device, fill, spec.compile, mesh, splits, units)
    updates = analysis.updates
    names = assign_parameters(updates, model) if updates else {}
    is_replicated = bool(updates) and called is not model
    if is_replicated:
        called = unwrap(called)  # each pass has its own wrapper
    optimizer_report = OptimizerReport(spec.optimizer)
    optimizers = [
        make_optimizer(
            task,
            scale_optimizer(spec, update.optimizer or spec.optimizer),
            plan,
            model,
            names=names[update.name],
        )
        for update in updates
    ] or [
        make_optimizer(
            task,
            scale_optimizer(spec, spec.optimizer),
            plan,
            model,
            optimizer_report,
            lr_factor=lr_scale_factor(spec),
        )
    ]
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and is_materialized(parameter)
    }
    step = TrainingStep(
        task=task,
        model=called,
        optimizer=optimizers[0],
        params=list(named.values()),
        plan=plan,
        place=plan.place(world.rank),
        device=device,
        precision=spec.precision,
        clip=spec.optimizer.clip,
        seed=spec.seed,
        batch_slice=_batch_slice(spec, plan, world),
        pipeline=pipeline,
        share=(_batch_slice(spec, plan, world).share, spec.batch) if plan.uneven else None,
        global_loss=_build_global_loss(spec, plan, world.rank, task, device, group),
        auxiliary=AuxiliaryLoss(task, group, plan.dp, device) if has_auxiliary_loss(task) else None,
    )
    if is_reduced and plan.dp * plan.microbatches > 1:
        step.buffers = _build_buffer_reducer(spec, plan, world, model, reductions, group, pipeline)
    if analysis.units is not None and pipeline is None and not spec.compile:
        step.inner = InnerGradients(model, reshards=plan.zero == 3)
    step.after_backward += _build_gradient_hooks(model, step, mesh, analysis)
    if not updates:
        _set_limits(step, spec, spec.optimizer, model)
    operations = WeightOperations(read_operations(task, plan, spec.optimizer), model, plan)
    local = build_local_sgd(model, step, plan)
    has_local_statistics = has_statistics and spec.batch_norm == "local" and local is None
    if has_local_statistics:
        statistics = [
            buffer
            for buffer in find_running_statistics(model).values()
            if buffer.is_floating_point() and is_materialized(buffer)
        ]
        if statistics:
            step.after_backward.append(partial(average_, statistics, group))
    own_buffers = describe_own_buffers(reductions)
    update: TrainingStep | UpdateSequence = step
    if updates:
        params = {name: [named[parameter] for parameter in names[name]] for name in names}
        step, update = _build_updates(spec, step, model, updates, optimizers, params)
        if is_replicated:
            update.replicate()
    if operations.operations:
        update.after_update.append(operations)
    loss_notes: tuple[str, ...] = ()
    if splits is not None and mesh is not None:
        loss_notes = _add_tensor_parallel_parts(step, model, analysis, mesh["tp"])
    notes = (
        *(() if analysis.recorded else (UNRECORDED,)),
        *(pretrained.notes if pretrained is not None else ()),
        *(splits.notes if splits is not None else ()),
        *loss_notes,
        *describe_scaling(
            spec,
            {update.name: update.optimizer or spec.optimizer for update in updates} or {"": spec.optimizer},
            optimizer_report.is_own,
        ),
        *optimizer_report.notes,
        *(local.notes() if local is not None else ()),
        *((LOCAL_BATCH_NORM,) if has_local_statistics else ()),
        *([own_buffers] if plan.data_ranks > 1 and own_buffers is not None else []),
    )
    return PreparedTraining(
        model,
        step,
        update,
        notes,
        local,
        modules=modules,
        lr_group=f"update {updates[0].name}" if len(updates) > 1 else optimizer_report.lr_group,
        operations=operations,
        comparison=_build_buffer_comparison(plan, model, reductions, pipeline, device),
    )


def _set_limits(step: TrainingStep, spec: Spec, optimizer: Optimizer, model: nn.Module) -> None:
    """Let a step limit elements and rows of gradients, and skip gradients that are not finite."""
    step.clip_value, step.skips_nan = optimizer.clip_value, spec.optimizer.on_nan == "skip"
    if optimizer.agc is None:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    excluded = select_names(optimizer.no_agc or "", model, names, "optimizer.no_agc")
    clipped = {parameter for name, parameter in model.named_parameters() if name not in excluded}
    step.agc = AdaptiveClipping(
        [parameter for parameter in step.params if parameter in clipped], optimizer.agc
    )


def _build_buffer_reducer(
    spec: Spec,
    plan: ResolvedPlan,
    world: World,
    model: nn.Module,
    reductions: Mapping[str, Reduction],
    group: dist.ProcessGroup | None,
    pipeline: Pipeline | None,
) -> BufferReducer:
    """Return what combines the changes of buffers, and let the pipeline use it."""
    stages = pipeline.find_buffer_stages() if pipeline is not None else None
    weight = _batch_slice(spec, plan, world).share / spec.batch
    reducer = BufferReducer(model, reductions, weight, group, plan.dp, stages)
    if pipeline is not None:
        pipeline.buffers = reducer
    return reducer


def _build_buffer_comparison(
    plan: ResolvedPlan,
    model: nn.Module,
    reductions: Mapping[str, Reduction],
    pipeline: Pipeline | None,
    device: torch.device,
) -> BufferComparison | None:
    """Return what compares the buffers of unknown meaning between data ranks, if these should be equal."""
    if plan.data_ranks == 1 or plan.is_asynchronous:
        return None
    known = {*reductions, *find_batch_norm_buffers(model)}
    names = [name for name, _ in model.named_buffers() if name not in known]
    elsewhere = pipeline.saved_elsewhere if pipeline is not None else frozenset()
    return BufferComparison(model, names, {*names} - elsewhere, device)


def _build_updates(
    spec: Spec,
    step: TrainingStep,
    model: nn.Module,
    updates: Sequence[Update],
    optimizers: Sequence[torch.optim.Optimizer],
    params: Mapping[str, list[nn.Parameter]],
) -> tuple[TrainingStep, UpdateSequence]:
    """Return the step that evaluations use, and the updates of a step.

    step: of all parameters, and with the hooks that complete gradients. params: of each update, by its name.
    """
    tasks = {update.name: task_of(step.task, update) for update in updates}
    steps = {
        update.name: replace(
            step,
            task=tasks[update.name],
            optimizer=optimizer,
            params=params[update.name],
            clip=(update.optimizer or spec.optimizer).clip,
            after_backward=list(step.after_backward),
            after_update=[],
        )
        for update, optimizer in zip(updates, optimizers, strict=True)
    }
    for update in updates:
        _set_limits(steps[update.name], spec, update.optimizer or spec.optimizer, model)
    together = [update for update in updates if update.loss is None]
    passes = []
    for update in updates:
        if update.loss is None and update is not together[0]:
            continue
        served = together if update.loss is None else [update]
        own = {id(parameter) for each in served for parameter in params[each.name]}
        others = [parameter for parameter in step.params if id(parameter) not in own]
        passes.append(UpdatePass(served, [steps[each.name] for each in served], others))
    with_loss = {update.name: tasks[update.name] for update in updates if update.loss is not None}
    first = ""
    if type(step.task).loss is Task.loss:  # so the loss of an evaluation is the sum of the losses of updates
        first = updates[0].name
        step.task = with_loss.pop(first)
    step.name, step.other_updates = first, with_loss
    sequence = UpdateSequence(model, passes, spec.seed, step.device, is_sharded=step.plan.zero >= 2)
    return step, sequence


def _build_pipeline(
    spec: Spec,
    plan: ResolvedPlan,
    world: World,
    task: Task,
    device: torch.device,
    analysis: ModelAnalysis,
    mesh: DeviceMesh | None,
) -> Pipeline:
    from paceline.parallel.pipeline.pass_traces import TracedModel
    from paceline.parallel.pipeline.runner import Pipeline  # imports torch's pipelining, 1 s
    from paceline.parallel.pipeline.stage import PipelineRank

    assert mesh is not None
    assert analysis.stand_in is not None
    assert analysis.trace is not None
    traced = TracedModel(
        task,
        analysis.model,
        analysis.stand_in,
        analysis.trace,
        analysis.batch,
        spec.precision,
        analysis.splits,
    )
    return Pipeline(traced, PipelineRank(plan, mesh, plan.place(world.rank), device), spec.seed)


def _build_global_loss(
    spec: Spec,
    plan: ResolvedPlan,
    rank: int,
    task: Task,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> GlobalLoss | None:
    """Return what computes the task's loss of the whole global batch, if it has one.

    group: ranks with the same part of the model.
    """
    if not has_global_loss(task):
        return None
    counts = tuple(
        RankBatchSlice(spec.batch, plan.microbatches, data_rank, plan.dp).share
        for data_rank in range(plan.dp)
    )
    return GlobalLoss(
        task, BatchShares(counts, plan.microbatches, plan.place(rank).dp, group), spec.precision, device
    )


def _build_gradient_hooks(
    model: nn.Module, step: TrainingStep, mesh: DeviceMesh | None, analysis: ModelAnalysis
) -> Iterator[Callable[[], None]]:
    """Yield functions to call after each backward pass, since torch's engines leave gradients incomplete."""
    if analysis.units is not None and step.pipeline is None and mesh is not None:
        from paceline.parallel.data_parallel.skipped_units import SkippedUnits

        skipped = SkippedUnits(
            model, [model.get_submodule(name) for name in analysis.units.names], step.device
        )
        if not analysis.units.all_used:
            skipped.track_gradients()
            yield partial(skipped.drop_unused_, select_data_mesh(mesh))
    if mesh is not None and step.plan.data_ranks > 1:
        scalars = [parameter for parameter in step.params if not parameter.dim()]
        if scalars:
            yield partial(average_scalars_, scalars, select_data_mesh(mesh))
    if sparse := list(find_sparse_parameters(model).values()):
        yield partial(coalesce_, sparse)


def _add_tensor_parallel_parts(
    step: TrainingStep, model: nn.Module, analysis: ModelAnalysis, mesh: DeviceMesh
) -> tuple[str, ...]:
    """Let a step sum partial gradients, and compute the loss on split logits if the task's loss allows it.

    mesh: the axis `tp`. Returns notes for the user.
    """
    from paceline.parallel.tensor.apply import sum_partial_gradients
    from paceline.parallel.tensor.vocab_parallel_loss import split_loss, try_split_loss

    splits = analysis.splits
    assert splits is not None
    if splits.partial:
        params = [
            parameter
            for name, parameter in model.named_parameters()
            if name in splits.partial and is_materialized(parameter)
        ]
        step.after_backward.append(partial(sum_partial_gradients, params, mesh.get_group()))
    if step.pipeline is not None or step.global_loss is not None:
        return ()
    is_split, note = try_split_loss(model, splits, step.task, analysis.batch, mesh)
    if is_split:
        step.loss_context = split_loss
    return (note,) if note is not None else ()


def _batch_slice(spec: Spec, plan: ResolvedPlan, world: World) -> RankBatchSlice:
    place = plan.place(world.rank)
    return RankBatchSlice(spec.batch, plan.microbatches, place.dp, plan.dp, changing_batches(spec))


def _group_along(plan: ResolvedPlan, rank: int, *axes: str) -> dist.ProcessGroup | None:
    """Return the group of ranks that differ from this rank only on these axes of the plan; None: all ranks.

    A collective.
    """
    members: dict[MeshCoordinate, list[int]] = {}
    for other in range(plan.ranks_per_stage * plan.pp):
        members.setdefault(replace(plan.place(other), **dict.fromkeys(axes, 0)), []).append(other)
    if len(members) == 1:
        return None
    groups = {place: dist.new_group(ranks) for place, ranks in members.items()}
    return groups[replace(plan.place(rank), **dict.fromkeys(axes, 0))]

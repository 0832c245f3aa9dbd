"""Distribute the model of a task by a plan, and build the step that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.samples import Samples
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.mesh import build_mesh
from paceline.distributed.world import World
from paceline.parallel.apply import parallelize
from paceline.parallel.data_parallel.batch_norm import (
    average_,
    find_running_statistics,
    has_batch_norm,
    sync_batch_norm,
)
from paceline.parallel.data_parallel.inner_gradients import InnerGradients
from paceline.parallel.data_parallel.reduced_buffers import (
    NONE,
    describe_own_buffers,
    read_reductions,
)
from paceline.parallel.loss.auxiliary_loss import AuxiliaryLoss, has_auxiliary_loss
from paceline.parallel.loss.forward import has_global_loss
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.training.checkpoint.identity import describe_modules
from paceline.training.init.deferred_init import fill_
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.pretrained import PretrainedWeights
from paceline.training.model_facts.model_analysis import ModelAnalysis, analyze_model, find_pretrained
from paceline.training.optimization.batch_scaling import describe_scaling, lr_scale_factor, scale_optimizer
from paceline.training.optimization.optimizer import OptimizerReport, compile_updates, make_optimizer
from paceline.training.optimization.read_updates import assign_parameters
from paceline.training.prepared import PreparedTraining, slice_batch
from paceline.training.step.local_sgd import build_local_sgd
from paceline.training.step.step import TrainingStep
from paceline.training.step.update_sequence import UpdateSequence, unwrap
from paceline.training.step.weight_operations import WeightOperations, read_operations
from paceline.training.step_parts import (
    add_tensor_parallel_parts,
    build_buffer_comparison,
    build_buffer_reducer,
    build_global_loss,
    build_gradient_hooks,
    build_updates,
    set_limits,
)
from paceline.updates import Update

if TYPE_CHECKING:
    from paceline.parallel.pipeline.runner import Pipeline


UNRECORDED = (
    "the model's constructor cannot be recorded, so each rank builds it whole before it keeps its share "
    "(docs/tasks.md)"
)
LOCAL_BATCH_NORM = (
    "BatchNorm takes its statistics from the samples of each rank (batch_norm=local), so ranks matter"
)


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

    fill_with: gives the distributed model other values than its initial ones. training: the training split,
    if it is open already. analysis: of the model, if it is made already; its model is changed in place.
    Raises PlanError and TaskError.
    """
    analysis = analysis if analysis is not None else analyze_model(spec, plan, task, device, training)
    model, splits = analysis.model, analysis.splits
    modules = describe_modules(model)
    pretrained = None
    if fill_with is None:
        pretrained = _read_pretrained(task, analysis)
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
    if has_statistics:
        model = _sync_statistics(spec, plan, world.rank, model, device, group)
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
    optimizers = _build_optimizers(spec, plan, task, model, updates, names, optimizer_report)
    if spec.compile:
        for optimizer in optimizers:
            compile_updates(optimizer)
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
        batch_slice=slice_batch(spec, plan, world),
        pipeline=pipeline,
        share=(slice_batch(spec, plan, world).share, spec.batch) if plan.uneven else None,
        global_loss=build_global_loss(spec, plan, world.rank, task, device, group),
        auxiliary=AuxiliaryLoss(task, group, plan.dp, device) if has_auxiliary_loss(task) else None,
    )
    if is_reduced and plan.dp * plan.microbatches > 1:
        step.buffers = build_buffer_reducer(spec, plan, world, model, reductions, group, pipeline)
    if analysis.units is not None and pipeline is None and not spec.compile:
        step.inner = InnerGradients(model, reshards=plan.zero == 3)
    step.after_backward += build_gradient_hooks(model, step, mesh, analysis)
    if not updates:
        set_limits(step, spec, spec.optimizer, model)
    operations = WeightOperations(read_operations(task, plan, spec.optimizer), model, plan)
    local = build_local_sgd(model, step, plan)
    has_local_statistics = has_statistics and spec.batch_norm == "local" and local is None
    if has_local_statistics:
        step.after_backward += _average_statistics(model, group)
    own_buffers = describe_own_buffers(reductions)
    update: TrainingStep | UpdateSequence = step
    if updates:
        params = {name: [named[parameter] for parameter in names[name]] for name in names}
        step, update = build_updates(spec, step, model, updates, optimizers, params)
        if is_replicated:
            update.replicate()
    if operations.operations:
        update.after_update.append(operations)
    loss_notes: tuple[str, ...] = ()
    if splits is not None and mesh is not None:
        loss_notes = add_tensor_parallel_parts(step, model, analysis, mesh["tp"])
    notes = (
        *_describe_weights(analysis, pretrained),
        *loss_notes,
        *_describe_optimizers(spec, updates, optimizer_report),
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
        comparison=build_buffer_comparison(plan, model, reductions, pipeline, device),
    )


def _read_pretrained(task: Task, analysis: ModelAnalysis) -> PretrainedWeights | None:
    """Return the pretrained weights of a task. Raise TaskError for tensors that nothing gives a value.

    Checked for all tensors on all ranks, whichever rank will hold them.
    """
    source = find_pretrained(task)
    pretrained = PretrainedWeights(source, analysis.model) if source is not None else None
    loaded = pretrained.tensors.keys() if pretrained is not None else set()
    analysis.weights.check_written(named_tensors(analysis.model).keys() - loaded)
    return pretrained


def _describe_weights(analysis: ModelAnalysis, pretrained: PretrainedWeights | None) -> Iterator[str]:
    """Yield notes on the initial weights and on how they are split."""
    if not analysis.recorded:
        yield UNRECORDED
    if pretrained is not None:
        yield from pretrained.notes
    if analysis.splits is not None:
        yield from analysis.splits.notes


def _describe_optimizers(spec: Spec, updates: Sequence[Update], report: OptimizerReport) -> Iterator[str]:
    """Yield notes on the optimizers and the scaling of their values."""
    optimizers = {update.name: update.optimizer or spec.optimizer for update in updates}
    yield from describe_scaling(spec, optimizers or {"": spec.optimizer}, report.is_own)
    yield from report.notes


def _sync_statistics(
    spec: Spec,
    plan: ResolvedPlan,
    rank: int,
    model: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> nn.Module:
    """Return the model with BatchNorm over all ranks, if the request or the plan needs that. A collective.

    group: ranks with the same part of the model.
    """
    if spec.batch_norm != "global" and plan.cp == 1:
        return model
    # Ranks of cp may have slices of the same samples, of different lengths.
    axes = ["dp"] if spec.batch_norm == "global" else []
    over = _group_along(plan, rank, *axes, "cp") if plan.cp > 1 else group
    return sync_batch_norm(model, device, over, equal_counts=not plan.uneven and plan.cp == 1)


def _average_statistics(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[Callable[[], None]]:
    """Yield what averages the running statistics that each rank takes from its own samples, if any."""
    statistics = [
        buffer
        for buffer in find_running_statistics(model).values()
        if buffer.is_floating_point() and is_materialized(buffer)
    ]
    if statistics:
        yield partial(average_, statistics, group)


def _build_optimizers(
    spec: Spec,
    plan: ResolvedPlan,
    task: Task,
    model: nn.Module,
    updates: Sequence[Update],
    names: Mapping[str, Sequence[str]],
    report: OptimizerReport,
) -> list[torch.optim.Optimizer]:
    """Return the optimizer of each update, or that of the whole model if the task has no updates.

    names: of the parameters of each update. report: is filled for the whole model.
    """
    if not updates:
        optimizer = scale_optimizer(spec, spec.optimizer)
        return [make_optimizer(task, optimizer, plan, model, report, lr_factor=lr_scale_factor(spec))]
    return [
        make_optimizer(
            task,
            scale_optimizer(spec, update.optimizer or spec.optimizer),
            plan,
            model,
            names=names[update.name],
        )
        for update in updates
    ]


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

"""Parts of a step that a plan or a task requires: reducers of buffers, losses, hooks and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.batch_slices import RankBatchSlice
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.mesh import select_data_mesh
from paceline.distributed.world import World
from paceline.parallel.data_parallel.buffer_comparison import BufferComparison
from paceline.parallel.data_parallel.fsdp import average_scalars_
from paceline.parallel.data_parallel.reduced_buffers import (
    BufferReducer,
    Reduction,
    find_batch_norm_buffers,
)
from paceline.parallel.loss.forward import has_global_loss
from paceline.parallel.loss.global_loss import BatchShares, GlobalLoss
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer, Spec
from paceline.task import Task
from paceline.training.model_facts.model_analysis import ModelAnalysis
from paceline.training.optimization.adaptive_clipping import AdaptiveClipping
from paceline.training.optimization.read_updates import task_of
from paceline.training.optimization.sparse_gradients import coalesce_, find_sparse_parameters
from paceline.training.optimizers.param_groups import select_some
from paceline.training.prepared import slice_batch
from paceline.training.step.step import TrainingStep
from paceline.training.step.update_sequence import UpdatePass, UpdateSequence
from paceline.updates import Update

if TYPE_CHECKING:
    from paceline.parallel.pipeline.runner import Pipeline


def set_limits(step: TrainingStep, spec: Spec, optimizer: Optimizer, model: nn.Module) -> None:
    """Let a step limit elements and rows of gradients, and skip gradients that are not finite."""
    step.clip_value, step.skips_nan = optimizer.clip_value, spec.optimizer.on_nan == "skip"
    if optimizer.agc is None:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    excluded = select_some(optimizer.no_agc or "", model, names, "optimizer.no_agc")
    clipped = {parameter for name, parameter in model.named_parameters() if name not in excluded}
    step.agc = AdaptiveClipping(
        [parameter for parameter in step.params if parameter in clipped], optimizer.agc
    )


def build_buffer_reducer(
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
    weight = slice_batch(spec, plan, world).share / spec.batch
    reducer = BufferReducer(model, reductions, weight, group, plan.dp, stages)
    if pipeline is not None:
        pipeline.buffers = reducer
    return reducer


def build_buffer_comparison(
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


def build_updates(
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
        set_limits(steps[update.name], spec, update.optimizer or spec.optimizer, model)
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


def build_global_loss(
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


def build_gradient_hooks(
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


def add_tensor_parallel_parts(
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

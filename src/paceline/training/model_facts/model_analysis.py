"""Analysis of a model on the meta device: what a plan needs to know before it distributes the model."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.data.fake import example_batch
from paceline.data.samples import Batch, Samples
from paceline.errors import PlanError
from paceline.parallel.compile import check_compilable
from paceline.parallel.data_parallel.fsdp import check_dtypes
from paceline.parallel.data_parallel.reduced_buffers import check_reduced_buffers
from paceline.parallel.loss.auxiliary_loss import check_auxiliary_loss
from paceline.parallel.loss.global_loss import check_global_loss
from paceline.plan.plan import ResolvedPlan, check_trainable
from paceline.spec import Spec
from paceline.task import PretrainedSource, Task, has_figures, read_layout
from paceline.torch_compat import multiply_experts_of_all_dtypes
from paceline.training.init.deferred_init import Weights, record
from paceline.training.optimization.read_updates import assign_parameters, read_updates, tasks_of_passes
from paceline.training.optimization.sparse_gradients import check_sparse
from paceline.updates import Update
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.parallel.data_parallel.shard_units import ShardUnits
    from paceline.parallel.pipeline.forward_trace import ForwardTrace
    from paceline.parallel.pipeline.stand_in_model import StandInModel
    from paceline.parallel.tensor.apply import Splits

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def widen_(model: nn.Module) -> None:
    """Convert a model to float64 and complex128. A buffer with two names stays one, other than in `to`."""
    buffers = {id(buffer): buffer.to(WIDER.get(buffer.dtype)) for buffer in model.buffers()}

    def widen(tensor: Tensor) -> Tensor:
        return buffers[id(tensor)] if id(tensor) in buffers else tensor.to(WIDER.get(tensor.dtype))

    model._apply(widen)


@dataclass(frozen=True)
class ModelAnalysis:
    """A model on the meta device, and what its plan needs to know of it. The same on every rank."""

    model: nn.Module
    weights: Weights
    recorded: bool  # whether its constructor could be recorded
    batch: Batch | None = None
    splits: Splits | None = None
    stand_in: StandInModel | None = None  # a copy of the model for recordings
    trace: ForwardTrace | None = None  # of a forward pass in training
    units: ShardUnits | None = None  # modules that `fully_shard` gathers separately
    updates: tuple[Update, ...] = ()  # of the task

    def copy_model(self) -> ModelAnalysis:
        """Return the analysis with a copy of the model, since `build_training` changes the model in place."""
        return replace(self, model=copy.deepcopy(self.model))


def build_meta_model(spec: Spec, task: Task) -> ModelAnalysis:
    """Build the model of a task on the meta device and record its initial weights."""
    with UserCode("model()", task.model):
        model, weights, recorded = record(task.model, spec.seed)
    multiply_experts_of_all_dtypes()
    if spec.precision == "fp64":
        widen_(model)
    # torch's first weight_norm leaves a computed tensor in its module, which deepcopy refuses.
    for module in model.modules():
        computed = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        }
        module.__dict__.update({key: value.detach() for key, value in computed.items()})
    return ModelAnalysis(model, weights, recorded)


def analyze_model(
    spec: Spec, plan: ResolvedPlan, task: Task, device: torch.device, training: Samples | None = None
) -> ModelAnalysis:
    """Build the model on the meta device and analyze it for `plan`.

    training: the training split, if it is open already.
    Raises PlanError or TaskError if the plan cannot train this model.
    """
    check_global_loss(task, plan)
    check_figures(task, plan)
    check_trainable(plan)
    check_auxiliary_loss(task, plan)
    if spec.compile:
        check_compilable(plan)
    analysis = build_meta_model(spec, task)
    model = analysis.model
    check_sparse(plan, model)
    check_reduced_buffers(task, plan, model, spec.compile)
    updates = read_updates(task, plan, spec.precision)
    if updates:
        assign_parameters(updates, model)
        analysis = replace(analysis, updates=updates)
    splits = stand_in = trace = None
    if plan.pp > 1:
        from paceline.parallel.pipeline.stand_in_model import StandInModel

        # Before the first pass, which may leave tensors in the model that deepcopy refuses.
        stand_in = StandInModel(model, read_layout(task), device)
    if plan.cp > 1:
        from paceline.parallel.context.check import check_context_parallel

        check_context_parallel(task, spec, plan, model)
    is_sharded = plan.zero >= 2 or (plan.splits_model and plan.data_ranks > 1)
    if not plan.splits_model and not is_sharded:
        return analysis
    batch = example_batch(spec, task, plan, training)
    units = None
    if is_sharded:
        from paceline.parallel.data_parallel.shard_units import find_shard_units

        units = find_shard_units(model, tasks_of_passes(task, updates), batch, spec.seed)
        check_dtypes(model, [model.get_submodule(name) for name in units.names], plan)
    with UserCode("the forward pass without values", task.model):
        if plan.tp > 1:
            from paceline.parallel.tensor.apply import find_splits

            splits = find_splits(model, task, batch, plan)
        if stand_in is not None:
            trace = stand_in.trace_step(task, batch, spec.precision)
            if splits is not None:
                trace.bar_tensor_parallel_pairs(splits.styles)
    return replace(analysis, batch=batch, splits=splits, stand_in=stand_in, trace=trace, units=units)


def check_figures(task: Task, plan: ResolvedPlan) -> None:
    """Raise PlanError if the task has figures that `plan` cannot compute."""
    if not has_figures(task) or (plan.pp == 1 and not plan.is_asynchronous):
        return
    reason = (
        "the first stage of a pipeline has no outputs"
        if plan.pp > 1
        else "its ranks update their weights separately"
    )
    raise PlanError(
        f"plan {plan} cannot compute figures() of {type(task).__name__}: {reason}; "
        "use single, ddp, zero1, zero2, zero3, hsdp, tp or cp"
    )


def validate_plan(spec: Spec, plan: ResolvedPlan, task: Task) -> None:
    """Raise the PlanError or TaskError that `build_training` would raise, without starting any rank."""
    analysis = analyze_model(spec, plan, task, torch.device("cpu"))
    if analysis.trace is not None:
        from paceline.parallel.pipeline import runner as pipeline

        pipeline.check(plan, task, analysis.model, analysis.trace)


def find_pretrained(task: Task) -> Path | PretrainedSource | None:
    """Return the initial weights that the task names; None if it names none."""
    with UserCode("pretrained()", task.pretrained):
        source = task.pretrained()
        return Path(source) if isinstance(source, (str, os.PathLike)) else source

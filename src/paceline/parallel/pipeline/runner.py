"""Pipeline parallelism on one rank: its stages, torch's schedule over them, training step and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.samples import Batch
from paceline.distributed.mesh import select_data_mesh
from paceline.distributed.places import find_places
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.errors import TaskError
from paceline.parallel.blocks import find_blocks
from paceline.parallel.compile import recompute_and_compile
from paceline.parallel.context.apply import ContextParallel
from paceline.parallel.data_parallel.fsdp import copy_output_views, drop_gathered, find_unshardable
from paceline.parallel.data_parallel.reduced_buffers import BufferReducer
from paceline.parallel.loss.auxiliary_loss import AuxiliaryLoss
from paceline.parallel.loss.forward import (
    MIXED_WEIGHTS,
    GlobalWeight,
    LossInspector,
    autocast,
    compute_weighted_loss,
)
from paceline.parallel.loss.forward import forward as run_forward
from paceline.parallel.loss.named_losses import NamedLossSums
from paceline.parallel.module_hooks import CallInterceptor, find_parts
from paceline.parallel.pipeline.actions import ActionObserver
from paceline.parallel.pipeline.eval import SequentialStageRunner
from paceline.parallel.pipeline.forward_trace import ForwardTrace
from paceline.parallel.pipeline.gradient_check import GradientCheck
from paceline.parallel.pipeline.pass_traces import PassTraces, TracedModel
from paceline.parallel.pipeline.sequence_slices import SequenceSlices, check_blocks
from paceline.parallel.pipeline.stage import PipelineRank, Stage, StagePartition, divide, stage_ranks
from paceline.parallel.pipeline.tied_weights import TiedWeightSync
from paceline.parallel.pytree import flatten
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task, read_layout
from paceline.user_code import UserCode


def check(plan: ResolvedPlan, task: Task, model: nn.Module, trace: ForwardTrace) -> None:
    """Raise PlanError if `model`, on the meta device, cannot be cut into the stages of `plan`.

    Starts no process and allocates no memory.
    """
    layout = read_layout(task)
    parts = find_parts(model, layout)
    if plan.cp > 1:
        check_blocks(plan, model, find_blocks(model, layout), parts)
    divide(plan, model, parts, trace)


class Pipeline:
    """One rank of a pipeline.

    `traced.model` is the whole model, on the meta device. After `parallelize`, its parameters that belong
    to the stages of this rank are real.
    """

    def __init__(self, traced: TracedModel, rank: PipelineRank, seed: int):
        self.task, self.model, self.precision = traced.task, traced.model, traced.precision
        self.rank, self.seed = rank, seed
        parts = find_parts(self.model, read_layout(self.task))
        self.partition = divide(rank.plan, self.model, parts, traced.trace)
        _split_tensors(traced, rank, self.partition)
        self.interceptor = CallInterceptor(parts)
        self.stages = [
            Stage(index, self.model, self.interceptor, self.partition, rank.device)
            for index in rank.own_stages
        ]
        self.runner = SequentialStageRunner(self.stages, rank)
        self.traces = PassTraces(traced, self.partition)
        self.with_grad = traced.find_parameters_with_grad()
        self.slices: SequenceSlices | None = None
        self.buffers: BufferReducer | None = None  # as in TrainingStep
        self.actions = ActionObserver()
        self.forward_error: Exception | None = None

    def parallelize(
        self, fill: Callable[..., None], compile: bool, shard_units: Sequence[str] | None = None
    ) -> None:
        """Apply cp, recomputation, compilation and sharding to the stages, then fill in their weights.

        `shard_units`: names of the modules that `fully_shard` gathers separately; None: the blocks.
        """
        plan, model = self.rank.plan, self.model
        units = find_blocks(model, read_layout(self.task))
        if plan.cp > 1:
            check_blocks(plan, model, units, self.interceptor.parts)
            context = ContextParallel(model, [units], plan, self.rank.device)
            self.slices = SequenceSlices(context, self.runner, plan)
        units = units or list(self.interceptor.parts.values())
        recompute_and_compile(units, plan, compile)
        if shard_units:
            units = [model.get_submodule(name) for name in shard_units]
        own = self.rank.own_stages
        for at, stage in enumerate(self.stages):
            stage.keep_buffers(model, self.partition, own[:at])
        shared_buffers = _collect_shared_buffers(model, self.partition, own)
        places = find_places(model, *self.stages, shared_buffers)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        copies = self._shard(units, names) if plan.zero >= 2 or plan.data_ranks > 1 else []
        fill(model, parts=[*self.stages, shared_buffers], places=places)
        # The first of several holders saves a tensor in checkpoints, and counts it in the norm.
        self.saved_elsewhere = frozenset(
            name for name, holders in self.partition.holders.items() if holders[0] not in own
        )
        self.counted_elsewhere = {
            id(parameter) for name, parameter in model.named_parameters() if name in self.saved_elsewhere
        }
        self.tied = TiedWeightSync(model, self.partition, self.rank, copies)
        self.gradient_check = self._build_gradient_check()

    def _shard(self, units: Sequence[nn.Module], names: Mapping[int, str]) -> list[tuple[str, Stage, str]]:
        """Apply `fully_shard`. Return `copies` of `TiedWeightSync`."""
        from torch.distributed.fsdp import fully_shard

        copies = [
            (names[id(parameter)], stage, own_name)
            for at, stage in enumerate(self.stages)
            for own_name, parameter in stage.take_copies(self.stages[:at])
        ]
        # A schedule with several stages per rank gathers and reshards their parameters itself.
        reshard = self.rank.plan.zero == 3 and len(self.stages) == 1
        mesh = select_data_mesh(self.rank.mesh)
        for unit in units:
            unit.register_forward_hook(copy_output_views)
        for stage in self.stages:
            in_stage = {id(module) for module in stage.parts.modules()}
            whole = find_unshardable(stage)
            for unit in units:
                if id(unit) in in_stage:
                    fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, ignored_params=whole)
            fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
        for stage in self.stages:
            stage.restore_shared()
        return copies

    def find_buffer_stages(self) -> dict[str, int]:
        """Return by name the first stage of this rank that holds each buffer."""
        own = self.rank.own_stages
        return {
            name: min(held)
            for name, _ in self.model.named_buffers()
            if (held := set(own).intersection(self.partition.holders[name]))
        }

    def _build_gradient_check(self) -> GradientCheck | None:
        if self.with_grad is None:
            return None
        shared = {*self.tied.groups, *(name for name, _, _ in self.tied.copies)}
        own = set(self.rank.own_stages)
        holders = self.partition.holders
        required = {name for name in self.with_grad - shared if own.intersection(holders[name])}
        return GradientCheck(self.rank.plan, self.model, self.with_grad, required)

    @cached_property
    def schedule(self) -> Any:
        """torch's schedule, which needs the shapes that cross the cuts."""
        from torch.distributed import pipelining

        from paceline.parallel.pipeline.split_backward import SplitStage

        plan = self.rank.plan
        calls = self.traces.step_trace.calls

        def crossing(cut: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=True)
                for meta in calls[cut].crossing_metas
            )

        stages = [
            SplitStage(
                stage,
                stage.index,
                len(stage_ranks(plan)),
                self.rank.device,
                input_args=() if stage.is_first else crossing(stage.first),
                output_args=torch.empty(1, device="meta", requires_grad=True)
                if stage.is_last
                else crossing(stage.end),
                group=self.rank.group,
                actions=self.actions,
            )
            for stage in self.stages
        ]
        schedule_class = getattr(pipelining, plan.schedule.torch_class)
        return schedule_class(
            stages if len(stages) > 1 else stages[0],
            plan.microbatches,
            loss_fn=lambda loss, index: loss,
            scale_grads=False,
        )

    def backward(
        self,
        batches: Sequence[Batch],
        step: int,
        weight: GlobalWeight | None,
        share_of: Callable[[Tensor, Tensor | float, int], Tensor],
        examine: LossInspector | None,
        named: NamedLossSums,
        auxiliary: AuxiliaryLoss | None = None,
    ) -> tuple[list[Tensor], list[Tensor | float], float | None]:
        """Compute the gradients of all stages.

        named: to which the named losses are added. auxiliary: whose gradients are added.

        Returns loss × items of each micro-batch, its items, and the expected items over all ranks. The
        lists are empty, and the last value is None, on ranks without the last stage.
        """
        for batch in batches:
            self.traces.check_shapes(batch)
        trace = self._find_trace(True, batches[0])
        self.tied.renew_copies()
        losses: list[Tensor] = []
        items: list[Tensor | float] = []
        whole: list[Tensor | float] = []

        def forward(stage: Stage, microbatch: int) -> Tensor:
            seed_torch(
                derive_seed(self.seed, "model", step, microbatch, *self.rank.place.stream, stage.index),
                self.rank.device,
            )
            self._begin(stage)
            batch = batches[microbatch]
            new_pass = self.buffers.new_pass(stage.index) if self.buffers is not None else nullcontext()
            with autocast(self.precision, self.rank.device), new_pass:
                loss, own_items = compute_weighted_loss(
                    self.task, self.model, batch, None if losses else examine, named, auxiliary
                )
            if isinstance(own_items, Tensor) != (weight is not None):
                raise TaskError(MIXED_WEIGHTS)
            if not whole:
                whole.append(
                    weight.result()
                    if weight is not None
                    else float(own_items) * len(batches) * self.rank.plan.dp
                )
            losses.append(loss.detach())
            items.append(own_items)
            # torch.stack: torch's engine could not detach a view.
            return torch.stack([loss * share_of(loss, whole[0], microbatch)])

        self._prepare_stages(forward, trace)
        index = torch.arange(len(batches))
        self._run_schedule(lambda: self.schedule.step(index=index, target=index, return_outputs=False))
        if self.gradient_check is not None:
            self.gradient_check.check_and_drop_extra()
        self.tied.sum_gradients()
        if weight is not None:
            weight.result()
        expected = whole[0] if whole and isinstance(whole[0], float) else None
        return losses, items, expected

    def _prepare_stages(self, forward: Callable[[Stage, int], Any], trace: ForwardTrace) -> None:
        for stage in self.stages:
            stage.model_forward, stage.calls = self._keeping_error(forward), trace.calls
            stage.buffers_.renew_copies()

    def _keeping_error(self, forward: Callable[[Stage, int], Any]) -> Callable[[Stage, int], Any]:
        """Keep the error of a forward pass: torch's engine raises another, with a dump of its tensors."""

        def forward_keeping_error(stage: Stage, microbatch: int) -> Any:
            try:
                return forward(stage, microbatch)
            except Exception as error:
                self.forward_error = error
                raise

        return forward_keeping_error

    def _run_schedule(self, run: Callable[[], Any]) -> None:
        try:
            with UserCode("the backward pass", self.task.loss):
                run()
        except (RuntimeError, TaskError):
            if self.forward_error is not None:
                raise self.forward_error from self.forward_error.__cause__
            raise

    def output(self, batch: Batch) -> Any:
        """Return the model's output for a batch, without gradients.

        Returns ELSEWHERE on ranks without the last stage.
        """
        trace = self._find_trace(False, batch)
        self.tied.renew_copies()
        self._prepare_stages(self._evaluation_forward(batch), trace)
        return self.runner.run(trace)

    def _evaluation_forward(self, batch: Batch) -> Callable[[Stage, int], Any]:
        def forward(stage: Stage, microbatch: int) -> Any:
            self._begin(stage)
            with autocast(self.precision, self.rank.device):
                return run_forward(self.task, self.model, batch)

        return forward

    def _find_trace(self, training: bool, batch: Batch) -> ForwardTrace:
        trace = self.traces.find(training, batch)
        if self.slices is not None:
            structure = flatten(self.task.inputs(batch))[1]
            if not self.slices.knows(structure):
                self._learn_slices(self.slices, structure, batch)
            self.slices.apply(self.traces.key(training, batch), structure, trace)
        return trace

    def _learn_slices(self, slices: SequenceSlices, structure: Any, batch: Batch) -> None:
        whole = self.traces.make(False, batch)
        self.tied.renew_copies()
        self._prepare_stages(self._evaluation_forward(batch), whole)
        slices.learn(structure, whole)
        self.reshard()

    def _begin(self, stage: Stage) -> None:
        if self.slices is not None:
            self.slices.context.begin(stage.index)

    def reshard(self) -> None:
        """Free the parameters that an evaluation has gathered."""
        for stage in self.stages:
            drop_gathered(stage)


def _split_tensors(traced: TracedModel, rank: PipelineRank, partition: StagePartition) -> None:
    """Split the parameters of the model over the ranks of tensor parallelism."""
    if traced.splits is None:
        return
    from paceline.parallel.tensor.apply import split_model

    blocks_of_stages = [partition.calls_of(stage) for stage in range(len(partition.begins))]
    split_model(traced.model, traced.splits, rank.mesh["tp"], blocks_of_stages)


def _collect_shared_buffers(model: nn.Module, partition: StagePartition, stages: Sequence[int]) -> nn.Module:
    """Return a module with the buffers outside of parts that these stages hold."""
    holder = nn.Module()
    for name, buffer in model.named_buffers():
        holders = partition.holders[name]
        is_shared = len(holders) > 1 or name in partition.changed_buffers
        if is_shared and set(stages).intersection(holders):
            holder.register_buffer(f"buffer_{len(holder._buffers)}", buffer)
    return holder

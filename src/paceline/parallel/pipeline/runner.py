"""Layers over ranks: the stages of a model under one of torch's schedules, and the step, evaluation and layout that belong to them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from paceline.data.loader import Batch
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.mesh import select_data_mesh
from paceline.distributed.places import find_places
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.errors import PlanError, TaskError
from paceline.parallel.activation_checkpoint import recompute
from paceline.parallel.blocks import find_blocks
from paceline.parallel.compile import compile_units
from paceline.parallel.context.apply import ContextParallel
from paceline.parallel.forward import GlobalWeight, LossInspector, autocast, compute_weighted_loss
from paceline.parallel.forward import forward as forward_of
from paceline.parallel.fsdp import copy_output_views, find_scalars
from paceline.parallel.module_hooks import CallInterceptor, find_parts
from paceline.parallel.pipeline.eval import SequentialStageRunner
from paceline.parallel.pipeline.sequence_slices import SequenceSlices, check_blocks
from paceline.parallel.pipeline.stage import Stage, StagePartition, divide, ranks_of
from paceline.parallel.pipeline.tied_weights import TiedWeightSync
from paceline.parallel.pipeline.tracer import ForwardTrace, StandInModel
from paceline.parallel.pytree import flatten
from paceline.plan.plan import MeshCoordinate, Plan
from paceline.task import Task, layout_of
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.parallel.tensor.apply import Splits

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


def check(plan: Plan, task: Task, model: nn.Module, recording: ForwardTrace) -> None:
    """Raise PlanError where `model`, on the meta device, cannot be cut into the stages of `plan`. Nothing is started or allocated."""
    layout = layout_of(task)
    parts = find_parts(model, layout)
    if plan.cp > 1:
        check_blocks(plan, model, find_blocks(model, layout), parts)
    divide(plan, model, parts, recording)


class Pipeline:
    """One rank of a pipeline. `model` is the whole one, on the meta device; afterwards what belongs to this rank's stages is real."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        rank: int,
        device: torch.device,
        precision: str,
        seed: int,
        example: Batch,
        splits: "Splits | None",
        recorded: StandInModel,
        recording: ForwardTrace,
    ):
        self.task, self.model, self.plan, self.device, self.precision, self.seed = (
            task,
            model,
            plan,
            device,
            precision,
            seed,
        )
        self.place: MeshCoordinate = plan.place(rank)
        self.mesh = mesh
        self.recorded = recorded
        self.looks = looks(task, example)
        self.recordings: dict[Any, ForwardTrace] = {
            (True, self.looks): recording
        }  # `recording` is of a training step with `example`
        self.lengths: dict[Any, int] = {}  # of the sequences of a recording that says what crosses in slices
        parts = find_parts(model, layout_of(task))
        self.division = divide(plan, model, parts, recording)
        if splits is not None:
            from paceline.parallel.tensor.apply import split_model

            stages = range(len(self.division.begins))
            split_model(
                model,
                splits,
                mesh["tp"],
                [self.division.calls[self.division.begins[at] : self.division.ends(at)] for at in stages],
            )
        self.gates = CallInterceptor(parts)
        self.ranks = ranks_of(plan)
        self.stages = [
            Stage(index, model, self.gates, self.division, device)
            for index, pp in enumerate(self.ranks)
            if pp == self.place.pp
        ]
        self.relay = SequentialStageRunner(self.stages, plan, self.place, device, mesh["pp"].get_group())
        self.learns = recorded.learns(task, example, precision)
        self.checked = False  # that all of these have got gradients
        self.slices: SequenceSlices | None = None
        self.failure: Exception | None = None

    def lay_out(
        self, fill: Callable[..., None], compile: bool, gathered: Sequence[str] | None = None
    ) -> None:
        """Split the sequence, recompute, compile, shard over the data ranks, fill. `gathered`: names of the modules that are gathered on
        their own; None: the blocks."""
        plan, model = self.plan, self.model
        units = find_blocks(model, layout_of(self.task))
        if plan.cp > 1:
            check_blocks(plan, model, units, self.gates.parts)
            self.slices = SequenceSlices(ContextParallel(model, units, plan, self.device), self.relay, plan)
        units = units or list(self.gates.parts.values())
        if plan.recompute != "none":
            for unit in units:
                recompute(unit, plan)
        if compile:
            compile_units(units)
        if gathered:
            units = [model.get_submodule(name) for name in gathered]
        mine = [stage.index for stage in self.stages]
        for at, stage in enumerate(self.stages):
            stage.keep_buffers(model, self.division, mine[:at])
        whole = _buffers_around(model, self.division, set(mine))
        places = find_places(model, *self.stages, whole)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        copies = self._shard(units, names) if plan.zero >= 2 or plan.data_ranks > 1 else []
        fill(model, parts=[*self.stages, whole], places=places)
        # Of what several stages hold the first one writes a checkpoint and counts the norm.
        self.elsewhere = frozenset(
            name for name, holders in self.division.holders.items() if holders[0] not in mine
        )
        self.counted_elsewhere = {
            id(parameter) for name, parameter in model.named_parameters() if name in self.elsewhere
        }
        self.tied = TiedWeightSync(model, self.division, plan, self.place, copies)

    def _shard(self, units: Sequence[nn.Module], names: Mapping[int, str]) -> list[tuple[str, Stage, str]]:
        """Returns what `TiedWeightSync` wants to know of parameters that two stages of this rank hold."""
        from torch.distributed.fsdp import fully_shard

        copies = [
            (names[id(parameter)], stage, own)
            for at, stage in enumerate(self.stages)
            for own, parameter in stage.take_copies(self.stages[:at])
        ]
        # A schedule with several stages says itself when their parameters are gathered.
        again = self.plan.zero == 3 and len(self.stages) == 1
        for unit in units:
            unit.register_forward_hook(copy_output_views)
        for stage in self.stages:
            here = {id(module) for module in stage.parts.modules()}
            whole = find_scalars(stage)
            for unit in units:
                if id(unit) in here:
                    fully_shard(
                        unit,
                        mesh=select_data_mesh(self.mesh),
                        reshard_after_forward=again,
                        ignored_params=whole,
                    )
            fully_shard(
                stage, mesh=select_data_mesh(self.mesh), reshard_after_forward=False, ignored_params=whole
            )
        for stage in self.stages:
            stage.give_back()
        return copies

    @cached_property
    def schedule(self) -> Any:
        """torch's, made when it is known what crosses the cuts."""
        from torch.distributed import pipelining

        from paceline.parallel.pipeline.split_backward import SplitStage

        assert self.plan.pp_schedule is not None
        calls = self.recordings[True, self.looks].calls

        def crossing(cut: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)
                for like in calls[cut].likes
            )

        stages = [
            SplitStage(
                stage,
                stage.index,
                len(self.ranks),
                self.device,
                input_args=() if stage.is_first else crossing(stage.first),
                output_args=torch.empty(1, device="meta", requires_grad=True)
                if stage.is_last
                else crossing(stage.end),
                group=self.mesh["pp"].get_group(),
            )
            for stage in self.stages
        ]
        kind = getattr(pipelining, SCHEDULES[self.plan.pp_schedule])
        own = stages if len(stages) > 1 else stages[0]
        return kind(own, self.plan.microbatches, loss_fn=lambda loss, index: loss, scale_grads=False)

    def backward(
        self,
        batches: Sequence[Batch],
        step: int,
        weight: GlobalWeight | None,
        share_of: Callable[[Tensor, Tensor | float], Tensor],
        examine: LossInspector | None,
    ) -> tuple[list[Tensor], list[Tensor | float], float | None]:
        """Add up the gradients of all stages. Returns loss × items and items of each micro-batch, and the items expected over all ranks;
        on the ranks that have not the last stage, nothing."""
        for batch in batches:
            if (found := looks(self.task, batch)) != self.looks:
                raise PlanError(
                    f"a pipeline sends micro-batches of one shape, {_shapes(self.looks)}, got {_shapes(found)}; use a plan without pp"
                )
        recording = self._recording(True, batches[0])
        self.tied.renew_copies()
        losses: list[Tensor] = []
        items: list[Tensor | float] = []
        whole: list[Tensor | float] = []

        def forward(stage: Stage, microbatches: int) -> Tensor:
            seed_torch(
                derive_seed(self.seed, "model", step, microbatches, *self.place.stream, stage.index),
                self.device,
            )
            self._begin(stage)
            batch = batches[microbatches]
            with autocast(self.precision, self.device):
                loss, items_here = compute_weighted_loss(
                    self.task, self.model, batch, None if losses else examine
                )
            if not whole:
                assert self.plan.dp is not None
                whole.append(
                    weight.result() if weight is not None else float(items_here) * len(batches) * self.plan.dp
                )
            losses.append(loss.detach())
            items.append(items_here)
            return torch.stack(
                [loss * share_of(loss, whole[0])]
            )  # no view, which torch's engine could not detach

        self._follow(forward, recording)
        index = torch.arange(len(batches))
        self._run(lambda: self.schedule.step(index=index, target=index, return_outputs=False))
        if self.learns is not None:
            self._compare_with(self.learns)
        self.tied.add_up()
        if weight is not None:
            weight.result()
        expected = whole[0] if whole and isinstance(whole[0], float) else None
        return losses, items, expected

    def _compare_with(self, learns: frozenset[str]) -> None:
        """Raise PlanError where a parameter lacks a gradient that a plain pass gives it. Drop those that a plain pass does not give:
        zeros, of what crosses a cut and is not used behind it."""
        shared = {*self.tied.groups, *(name for name, _, _ in self.tied.copies)}
        mine = {stage.index for stage in self.stages}
        here = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and is_materialized(parameter)
        ]
        if not self.checked:
            due = {name for name in learns - shared if mine.intersection(self.division.holders[name])}
            missing = [name for name, parameter in here if parameter.grad is None and name in due]
            if missing:
                others = f" and {len(missing) - 1} more" if missing[1:] else ""
                raise PlanError(
                    f"plan {self.plan}: {missing[0]}{others} got no gradient in this pipeline, and gets one on one process; "
                    "this is a defect of Paceline; use pp_schedule=1f1b or a plan without pp"
                )
            self.checked = True
        for name, parameter in here:
            if name not in learns:
                parameter.grad = None

    def _follow(self, forward: Callable[[Stage, int], Any], recording: ForwardTrace) -> None:
        for stage in self.stages:
            stage.model_forward, stage.calls = self._remembering(forward), recording.calls
            stage.changing.renew()

    def _remembering(self, forward: Callable[[Stage, int], Any]) -> Callable[[Stage, int], Any]:
        def remembering(stage: Stage, microbatches: int) -> Any:
            try:
                return forward(stage, microbatches)
            except (
                Exception
            ) as error:  # torch's engine raises another one, with all that it knows of its tensors
                self.failure = error
                raise

        return remembering

    def _run(self, run: Callable[[], Any]) -> None:
        try:
            with UserCode("the backward pass", self.task.loss):
                run()
        except (RuntimeError, TaskError):
            if self.failure is not None:
                raise self.failure from self.failure.__cause__
            raise

    def output(self, batch: Batch) -> Any:
        """What the model makes of a batch, on the ranks that have the last stage; ELSEWHERE on the others. Without gradients."""
        recording = self._recording(False, batch)
        self.tied.renew_copies()
        self._follow(self._evaluating(batch), recording)
        return self.relay.run(recording)

    def _evaluating(self, batch: Batch) -> Callable[[Stage, int], Any]:
        def forward(stage: Stage, microbatches: int) -> Any:
            self._begin(stage)
            with autocast(self.precision, self.device):
                return forward_of(self.task, self.model, batch)

        return forward

    def _recording(self, training: bool, batch: Batch) -> ForwardTrace:
        """How a pass goes with a batch that looks so, and what crosses the cuts in it."""
        key = training, looks(self.task, batch)
        if key not in self.recordings:
            self.recordings[key] = self._record(training, batch)
        if self.slices is not None:
            self._cut_sequences(self.slices, key, batch)
        return self.recordings[key]

    def _record(self, training: bool, batch: Batch) -> ForwardTrace:
        recording = self.recorded.record(self.task, batch, self.precision, training)
        if tuple(call.part for call in recording.calls) != self.division.calls:
            raise PlanError(
                "the model calls other parts in evaluation than in training, where a pipeline was cut; use a plan without pp"
            )
        changed = {
            name
            for name, use in recording.buffers.items()
            if use.changed and len(self.division.holders[name]) > 1
        }
        if strange := sorted(changed - self.division.changed):
            raise PlanError(
                f"the model changes buffer {strange[0]} in evaluation, and not in training; use a plan without pp"
            )
        return recording

    def _cut_sequences(self, slices: SequenceSlices, key: tuple[bool, Any], batch: Batch) -> None:
        """From then on slices cross in passes that look so."""
        structure = flatten(self.task.inputs(batch))[1]
        if not slices.knows(structure):
            whole = self._record(False, batch)
            self.tied.renew_copies()
            self._follow(self._evaluating(batch), whole)
            slices.learn(structure, whole)
            self.rest()
        if key not in self.lengths:
            self.lengths[key] = slices.cut(structure, self.recordings[key])
        slices.context.length = self.lengths[key]

    def _begin(self, stage: Stage) -> None:
        if self.slices is not None:
            self.slices.context.begin(stage.index)

    def rest(self) -> None:
        """Let go of parameters that an evaluation has gathered."""
        for module in (module for stage in self.stages for module in stage.modules()):
            if reshard := getattr(module, "reshard", None):
                reshard()


def _buffers_around(model: nn.Module, division: StagePartition, mine: set[int]) -> nn.Module:
    """The buffers outside of parts that these stages hold."""
    holder = nn.Module()
    for name, buffer in model.named_buffers():
        holders = division.holders[name]
        if (len(holders) > 1 or name in division.changed) and mine.intersection(holders):
            holder.register_buffer(f"buffer_{len(holder._buffers)}", buffer)
    return holder


def looks(task: Task, batch: Batch) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in tree_leaves(task.inputs(batch))
    )


def _shapes(found: tuple[Any, ...]) -> str:
    return " and ".join(str(one[0]) for one in found if isinstance(one, tuple))

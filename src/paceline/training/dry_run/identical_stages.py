"""Places of a pipeline with identical stages: their volumes differ only in the names of the parts."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from paceline.parallel.module_hooks import find_parts
from paceline.parallel.pipeline.forward_trace import ForwardTrace
from paceline.parallel.pipeline.stage import StagePartition, divide, stage_ranks
from paceline.parallel.tensor.apply import Splits
from paceline.plan.comm_volume import CommVolume, sum_entries
from paceline.plan.plan import ResolvedPlan
from paceline.task import Layout
from paceline.training.dry_run.microbatch_replay import are_microbatches_identical
from paceline.training.model_facts.model_analysis import ModelAnalysis


@dataclass(frozen=True)
class IdenticalPlace:
    """The first place with the same stages, and a map from the names of its parts to those of this place.

    A place that differs from all earlier places refers to itself.
    """

    place: int
    names: Mapping[str, str]

    def translate(self, volume: CommVolume, rank: int) -> CommVolume:
        """Return what `rank` sends at this place, given the volume of the first rank of the other place."""
        entries = [replace(entry, module=self._rename(entry.module)) for entry in volume.entries]
        return CommVolume(
            rank, sum_entries((e.collective, e.axis, e.ranks, e.module, e.calls, e.bytes) for e in entries)
        )

    def _rename(self, module: str) -> str:
        part = next((part for part in self.names if module == part or module.startswith(f"{part}.")), None)
        return module if part is None else self.names[part] + module[len(part) :]


def find_identical_places(
    plan: ResolvedPlan, layout: Layout, analysis: ModelAnalysis
) -> list[IdenticalPlace]:
    """Return, for each place of `plan`, the first identical place.

    Stages between the first and the last are identical if they run the same operations on the same shapes,
    with the same parameters split the same way. No places are identical under schedules that compute
    gradients in two halves: the place decides for which micro-batches they do so.
    """
    places = [IdenticalPlace(place, {}) for place in range(plan.pp)]
    if analysis.trace is None or plan.splits_backward or not are_microbatches_identical(plan):
        return places
    parts = find_parts(analysis.model, layout)
    partition = divide(plan, analysis.model, parts, analysis.trace)
    stages_of_place = [
        [stage for stage, pp in enumerate(stage_ranks(plan)) if pp == place] for place in range(plan.pp)
    ]
    first_by_signature: dict[Hashable, int] = {}
    for place, stages in enumerate(stages_of_place):
        signature = tuple(
            _stage_signature(stage, partition, parts, analysis.trace, analysis) for stage in stages
        )
        first = first_by_signature.setdefault(signature, place)
        first_parts, own_parts = (
            [part for stage in stages_ for part in partition.parts_of(stage)]
            for stages_ in (stages_of_place[first], stages)
        )
        places[place] = IdenticalPlace(first, dict(zip(first_parts, own_parts, strict=True)))
    return places


def _stage_signature(
    stage: int,
    partition: StagePartition,
    parts: Mapping[str, nn.Module],
    trace: ForwardTrace,
    analysis: ModelAnalysis,
) -> Hashable:
    """Return a value that identical stages share.

    It is the number of the stage if the stage is at an end, or has parameters outside of parts or shared with
    other stages.
    """
    begin, end, own = partition.begins[stage], partition.end_of(stage), partition.parts_of(stage)
    inside = {id(parameter) for name in own for parameter in parts[name].parameters()}
    held = [
        (id(parameter) in inside, partition.holders[name])
        for name, parameter in analysis.model.named_parameters()
    ]
    if (
        begin == 0
        or end == len(trace.calls)
        or any(stage in holders and (not is_inside or len(holders) > 1) for is_inside, holders in held)
    ):
        return stage
    return (
        tuple(
            (own.index(call.part) if call.part in own else call.part, call.ops_hash)
            for call in trace.calls[begin:end]
        ),
        tuple(tuple(trace.calls[cut].crossing_metas) for cut in (begin, end)),
        tuple((name.rpartition(".")[0], _part_signature(name, parts[name], analysis.splits)) for name in own),
    )


def _part_signature(part: str, module: nn.Module, splits: Splits | None) -> Hashable:
    return tuple(
        (
            inner_name,
            type(inner),
            _tensor_signature(inner),
            _split_signature(f"{part}.{inner_name}" if inner_name else part, inner, splits),
        )
        for inner_name, inner in module.named_modules()
    )


def _tensor_signature(module: nn.Module) -> Hashable:
    return tuple(
        (key, tensor.shape, tensor.dtype, tensor.requires_grad)
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )


def _split_signature(name: str, module: nn.Module, splits: Splits | None) -> Hashable:
    """Return how tensor parallelism treats a module."""
    if splits is None:
        return None
    sequence = splits.sequence
    module_lists = (
        (
            sequence.scattered_sums,
            sequence.gathered_inputs,
            sequence.gathered_outputs,
            sequence.ready_inputs,
            sequence.scattered_outputs,
        )
        if sequence is not None
        else ()
    )
    return (
        splits.styles.get(name),
        splits.draws.get(name),
        tuple(name in modules for modules in module_lists),
        sequence.blocks.get(name) if sequence is not None else None,
        tuple(f"{name}.{key}" in splits.partial for key in module._parameters),
    )

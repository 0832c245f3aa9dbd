"""Places of a pipeline whose stages are alike: what one of them sends, the others send under the names of their own parts."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from paceline.parallel.module_hooks import find_parts
from paceline.parallel.pipeline.stage import StagePartition, divide, stage_ranks
from paceline.parallel.pipeline.tracer import ForwardTrace
from paceline.parallel.tensor.apply import Splits
from paceline.plan.comm_volume import CommVolume, added_up
from paceline.plan.plan import TWICE, Plan
from paceline.task import Layout
from paceline.training.dry_run.microbatch_replay import are_alike
from paceline.training.setup import ModelAnalysis


@dataclass(frozen=True)
class IdenticalPlace:
    """The first place that a place is like, and the part here of each part there. A place that is like none before it is its own."""

    place: int
    names: Mapping[str, str]

    def told_here(self, there: CommVolume, rank: int) -> CommVolume:
        """What `rank` sends here, where the first rank of the other place sends so."""
        entries = [replace(entry, module=self._here(entry.module)) for entry in there.entries]
        return CommVolume(
            rank, added_up((e.collective, e.axis, e.ranks, e.module, e.calls, e.bytes) for e in entries)
        )

    def _here(self, module: str) -> str:
        part = next((part for part in self.names if module == part or module.startswith(f"{part}.")), None)
        return module if part is None else self.names[part] + module[len(part) :]


def twins(plan: Plan, layout: Layout, studied: ModelAnalysis) -> list[IdenticalPlace]:
    """Of each place of `plan`, whose data degree is said.

    Alike are stages between the first and the last that run the same operations on the same shapes, with parameters that are the same
    and split the same way. Schedules that compute gradients in two halves choose by the place for which micro-batches they do."""
    found = [IdenticalPlace(place, {}) for place in range(plan.pp)]
    if studied.recording is None or plan.pp_schedule in TWICE or not are_alike(plan):
        return found
    parts = find_parts(studied.model, layout)
    division = divide(plan, studied.model, parts, studied.recording)
    of_place = [
        [stage for stage, at in enumerate(stage_ranks(plan)) if at == place] for place in range(plan.pp)
    ]
    first: dict[Hashable, int] = {}
    for place, stages in enumerate(of_place):
        looks = tuple(_looks(stage, division, parts, studied.recording, studied) for stage in stages)
        there = first.setdefault(looks, place)
        names = [
            [part for stage in of for part in division.parts_of(stage)] for of in (of_place[there], stages)
        ]
        found[place] = IdenticalPlace(there, dict(zip(*names, strict=True)))
    return found


def _looks(
    stage: int,
    division: StagePartition,
    parts: Mapping[str, nn.Module],
    recording: ForwardTrace,
    studied: ModelAnalysis,
) -> Hashable:
    """What a stage is told apart by: its number where it is at an end or has parameters outside of parts or in common with others."""
    begin, end, own = division.begins[stage], division.end_of(stage), division.parts_of(stage)
    inside = {id(parameter) for name in own for parameter in parts[name].parameters()}
    held = [
        (id(parameter) in inside, division.holders[name])
        for name, parameter in studied.model.named_parameters()
    ]
    if (
        begin == 0
        or end == len(recording.calls)
        or any(stage in at and (not within or len(at) > 1) for within, at in held)
    ):
        return stage
    return (
        tuple(
            (own.index(call.part) if call.part in own else call.part, call.ops_hash)
            for call in recording.calls[begin:end]
        ),
        tuple(tuple(recording.calls[cut].crossing_metas) for cut in (begin, end)),
        tuple((name.rpartition(".")[0], _looks_of_part(name, parts[name], studied.splits)) for name in own),
    )


def _looks_of_part(part: str, module: nn.Module, splits: Splits | None) -> Hashable:
    return tuple(
        (inner, type(one), _own(one), _said(f"{part}.{inner}" if inner else part, one, splits))
        for inner, one in module.named_modules()
    )


def _own(module: nn.Module) -> Hashable:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return tuple((key, one.shape, one.dtype, one.requires_grad) for key, one in tensors if one is not None)


def _said(name: str, module: nn.Module, splits: Splits | None) -> Hashable:
    """What is done with a module where features are split."""
    if splits is None:
        return None
    between = splits.between
    lists = (
        (between.exits, between.entrances, between.gathers, between.fed, between.scatters)
        if between is not None
        else ()
    )
    return (
        splits.styles.get(name),
        splits.draws.get(name),
        tuple(name in of for of in lists),
        between.blocks.get(name) if between is not None else None,
        tuple(f"{name}.{key}" in splits.partial for key in module._parameters),
    )

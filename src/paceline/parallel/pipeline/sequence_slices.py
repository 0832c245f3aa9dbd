"""Context parallelism in a pipeline: a cut between blocks is crossed by slices of sequences."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.context.apply import ContextParallel
from paceline.parallel.context.check import check_sequence_length
from paceline.parallel.context.slices import count_rank_positions
from paceline.parallel.pipeline.eval import SequentialStageRunner
from paceline.parallel.pipeline.forward_trace import ForwardTrace, TensorMeta
from paceline.plan.plan import Plan

SplitDims = Mapping[int, Sequence[int | None]]  # cut -> dim along which each tensor that crosses it is split


def check_blocks(
    plan: Plan, model: nn.Module, units: Sequence[nn.Module], parts: Mapping[str, nn.Module]
) -> None:
    """Raise PlanError if a pipeline would cut inside a block; cp requires whole blocks."""
    whole = {id(module) for part in parts.values() for module in part.modules()}
    for name, module in model.named_modules():
        if module in units and id(module) not in whole:
            raise PlanError(
                f"plan {plan}: pp can cut {name}, which has most of the parameters, and cp needs it whole; "
                "use pp or cp alone, or name other blocks in layout()"
            )


@dataclass
class SequenceSlices:
    """The slices of sequences that cross the cuts of a pipeline."""

    context: ContextParallel
    runner: SequentialStageRunner
    plan: Plan

    def __post_init__(self) -> None:
        self.dims: list[tuple[Any, SplitDims]] = []  # by structure of the model's arguments
        self.lengths: dict[Hashable, int] = {}  # of whole sequences, by key of a trace

    def learn(self, structure: Any, trace: ForwardTrace) -> None:
        """Find what is split, by trial passes through the stages, and check that the output is unchanged.

        `trace`: of whole sequences.
        """
        shapes: dict[int, list[torch.Size]] = {}

        def run() -> Any:
            output, shapes_by_cut = self.runner.try_run()
            shapes.update(shapes_by_cut)
            return output

        self.context.learn(run, self.runner.gather)
        own = []
        for cut, sliced in shapes.items():
            if cut:
                pairs = zip(trace.calls[cut].crossing_metas, sliced, strict=True)
                own.append((cut, [_find_split_dim(whole, part) for whole, part in pairs]))
        self.dims.append((structure, dict(self.runner.gather(own))))

    def knows(self, structure: Any) -> bool:
        return any(known == structure for known, _ in self.dims)

    def apply(self, key: Hashable, structure: Any, trace: ForwardTrace) -> None:
        """Prepare for a pass with this trace.

        On the first call, its crossing shapes become those of slices.
        """
        if key not in self.lengths:
            self.lengths[key] = self._slice_metas(structure, trace)
        self.context.set_length(self.lengths[key])

    def _slice_metas(self, structure: Any, trace: ForwardTrace) -> int:
        """Return the length of whole sequences; 0 if no cut lies between blocks."""
        length = 0
        for cut, dims in next(dims for known, dims in self.dims if known == structure).items():
            metas = trace.calls[cut].crossing_metas
            for meta, dim in zip(metas, dims, strict=True):
                if dim is not None:
                    length = meta.shape[dim]
                    check_sequence_length(self.plan, length)
            trace.calls[cut].crossing_metas = [
                meta if dim is None else self._slice_meta(meta, dim)
                for meta, dim in zip(metas, dims, strict=True)
            ]
        return length

    def _slice_meta(self, whole: TensorMeta, dim: int) -> TensorMeta:
        count = count_rank_positions(whole.shape[dim], self.context.mesh.get_local_rank(), self.plan.cp)
        return replace(whole, shape=(*whole.shape[:dim], count, *whole.shape[dim + 1 :]))


def _find_split_dim(whole: TensorMeta, part: torch.Size) -> int | None:
    return next(
        (
            dim
            for dim, (size, part_size) in enumerate(zip(whole.shape, part, strict=True))
            if size != part_size
        ),
        None,
    )

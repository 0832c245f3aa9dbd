"""Context parallelism in a pipeline: where a cut lies between blocks, slices of sequences cross it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.context.apply import ContextParallel, check_sequence_length
from paceline.parallel.pipeline.eval import SequentialStageRunner
from paceline.parallel.pipeline.tracer import ForwardTrace, TensorMeta
from paceline.plan.plan import Plan

Dims = Mapping[int, Sequence[int | None]]  # cut -> along which dim each tensor that crosses it is cut


def check_blocks(
    plan: Plan, model: nn.Module, units: Sequence[nn.Module], parts: Mapping[str, nn.Module]
) -> None:
    """Raise PlanError where a pipeline would cut blocks inside, which attend to slices as a whole."""
    whole = {id(module) for part in parts.values() for module in part.modules()}
    for name, module in model.named_modules():
        if module in units and id(module) not in whole:
            raise PlanError(
                f"plan {plan}: pp can cut {name}, which has most of the parameters, and cp needs it whole; "
                "use pp or cp alone, or name other blocks in layout()"
            )


@dataclass
class SequenceSlices:
    """`model` as one rank of a pipeline has it; `units` are its blocks."""

    context: ContextParallel
    relay: SequentialStageRunner
    plan: Plan

    def __post_init__(self) -> None:
        self.dims: list[tuple[Any, Dims]] = []  # by the structure of what the model is called with

    def learn(self, structure: Any, recording: ForwardTrace) -> None:
        """Find out what is cut, with the stages as they are, and that it makes no difference. `recording`: of whole sequences."""
        sizes: dict[int, list[torch.Size]] = {}

        def run() -> Any:
            output, found = self.relay.attempt()
            sizes.update(found)
            return output

        self.context.learn(run, self.relay.gather)
        here = [
            (cut, [_dim(*pair) for pair in zip(recording.calls[cut].likes, found, strict=True)])
            for cut, found in sizes.items()
            if cut
        ]
        self.dims.append((structure, dict(self.relay.gather(here))))

    def knows(self, structure: Any) -> bool:
        return any(known == structure for known, _ in self.dims)

    def cut(self, structure: Any, recording: ForwardTrace) -> int:
        """Let a recording say what crosses where sequences are in slices. Returns their whole length; 0 where no cut is between blocks."""
        length = 0
        for cut, dims in next(dims for known, dims in self.dims if known == structure).items():
            likes = recording.calls[cut].likes
            for like, dim in zip(likes, dims, strict=True):
                if dim is not None:
                    length = like.shape[dim]
                    check_sequence_length(self.plan, length)
            recording.calls[cut].likes = [
                _part(like, dim, self.plan.cp) for like, dim in zip(likes, dims, strict=True)
            ]
        return length


def _dim(whole: TensorMeta, part: torch.Size) -> int | None:
    return next(
        (dim for dim, (one, other) in enumerate(zip(whole.shape, part, strict=True)) if one != other), None
    )


def _part(whole: TensorMeta, dim: int | None, parts: int) -> TensorMeta:
    return replace(
        whole, shape=tuple(size // parts if at == dim else size for at, size in enumerate(whole.shape))
    )

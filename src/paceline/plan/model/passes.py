"""ModelFacts of a step that runs several passes of one model, as the updates of a task do."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from math import ceil
from typing import NamedTuple

from paceline.plan.model.facts import BlockFacts, LiveBytes, ModelFacts, TensorVolume


class PassFacts(NamedTuple):
    """A forward and backward pass. rate: how often a step runs it, on average. trained: its parameters."""

    facts: ModelFacts
    rate: float
    trained: int


def combine_passes(passes: Sequence[PassFacts]) -> ModelFacts:
    """Return the facts of a step that runs all passes, one after the other, on the same model.

    Computation adds up; memory is that of the pass that needs most. Only data parallelism divides such steps.
    """
    first = passes[0].facts
    rates = [of_pass.rate for of_pass in passes]
    blocks = zip(*(_list_blocks(of_pass.facts) for of_pass in passes), strict=True)
    start, *middle, end = (_combine_block(parts, rates) for parts in blocks)
    return replace(
        first,
        first=start,
        runs=tuple((run[0], len(run)) for run in (list(equal) for _, equal in groupby(middle, _signature))),
        last=end,
        heads=(),
        passes=sum(rates),
        updates=sum(of_pass.rate * of_pass.trained for of_pass in passes)
        / sum(of_pass.trained for of_pass in passes),
        is_data_parallel_only=True,
    )


def _list_blocks(facts: ModelFacts) -> list[BlockFacts]:
    return [block for block, count in facts.parts() for _ in range(count)]


def _signature(block: BlockFacts) -> BlockFacts:
    """Return a value that equal blocks share: all fields but the name."""
    return replace(block, name="")


def _combine_block(parts: Sequence[BlockFacts], rates: Sequence[float]) -> BlockFacts:
    pairs = list(zip(parts, rates, strict=True))
    lives = [block.lives for block in parts if block.lives is not None]
    trained = sum(1 - block.frozen for block in parts)  # each pass trains other parameters
    return replace(
        parts[0],
        frozen=max(0.0, 1 - trained),
        products=tuple(
            replace(product, count=product.count * rate, cut=None)
            for block, rate in pairs
            for product in block.products
        ),
        attention=tuple(
            attention for block, rate in pairs for attention in block.attention * max(1, ceil(rate))
        ),
        saved={
            recompute: _largest(block.saved.get(recompute, TensorVolume()) for block in parts)
            for recompute in dict.fromkeys(key for block in parts for key in block.saved)
        },
        traffic=TensorVolume(
            *(
                sum(size * rate for size, rate in zip(sizes, rates, strict=True))
                for sizes in zip(*(block.traffic for block in parts), strict=True)
            )
        ),
        boundary=max(block.boundary for block in parts),
        kernels=round(sum(block.kernels * rate for block, rate in pairs)),
        expert_kernels=round(sum(block.expert_kernels * rate for block, rate in pairs)),
        operations=tuple(
            replace(operation, count=operation.count * rate)
            for block, rate in pairs
            for operation in block.operations
        ),
        lives=LiveBytes(*map(max, zip(*lives, strict=True))) if lives else None,
    )


def _largest(volumes: Iterable[TensorVolume]) -> TensorVolume:
    return TensorVolume(*map(max, zip(*volumes, strict=True)))

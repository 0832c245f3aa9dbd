"""The collectives as a table: the values on each rank before and after, and the bus factor.

S, algbw = S / time and busbw = algbw · factor are defined as in nccl-tests (PERFORMANCE.md). S is the whole
tensor: the input of reduce-scatter, the output of all-gather, the tensor of the root in scatter and gather,
the tensor of each rank in all-to-all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.plan.comm_volume import RING_FACTORS

if TYPE_CHECKING:
    import torch

PERIOD = 5  # of the test values along a tensor
SUM, MIN, MAX, PRODUCT, AVERAGE = "sum", "min", "max", "product", "average"
ROOT = 0


@dataclass(frozen=True)
class GroupRank:
    """A rank within its group, and the size of the group."""

    rank: int
    size: int


@dataclass(frozen=True)
class KnownValues:
    """`count` test values of a rank, from position `start`. If `rank` is None, the reduced ones."""

    rank: int | None
    start: int
    count: int
    reduction: str = SUM  # which the values are for, and by which those of all ranks are reduced


@dataclass(frozen=True)
class CollectiveOperation:
    """One collective. Each function takes the rank and the number of elements of S.

    elements: number of input and of output elements on the rank.
    given, expected: values of input and output on the rank, block by block; empty if they are unspecified.
    """

    name: str
    factor: Callable[[int], float]  # busbw / algbw, by number of ranks
    elements: Callable[[GroupRank, int], tuple[int, int]]
    expected: Callable[[GroupRank, int], list[KnownValues]]
    given: Callable[[GroupRank, int], list[KnownValues]] = lambda at, count: [KnownValues(at.rank, 0, count)]
    splits: bool = False  # S consists of one block per rank
    reduction: str = SUM  # of operations that reduce


def _block(at: GroupRank, count: int) -> tuple[int, int]:
    """Return the start of a rank's block in the whole tensor, and its length."""
    length = count // at.size
    return at.rank * length, length


def _at_root(at: GroupRank, values: list[KnownValues]) -> list[KnownValues]:
    return values if at.rank == ROOT else []


def _of_all(at: GroupRank, start: int, length: int) -> list[KnownValues]:
    return [KnownValues(rank, start, length) for rank in range(at.size)]


OPERATIONS = {
    operation.name: operation
    for operation in (
        CollectiveOperation(
            "all-reduce",
            RING_FACTORS["all-reduce"],
            elements=lambda at, count: (count, count),
            expected=lambda at, count: [KnownValues(None, 0, count)],
        ),
        CollectiveOperation(
            "reduce-scatter",
            RING_FACTORS["reduce-scatter"],
            elements=lambda at, count: (count, count // at.size),
            expected=lambda at, count: [KnownValues(None, *_block(at, count))],
            splits=True,
        ),
        CollectiveOperation(
            "all-gather",
            RING_FACTORS["all-gather"],
            elements=lambda at, count: (count // at.size, count),
            given=lambda at, count: [KnownValues(at.rank, 0, count // at.size)],
            expected=lambda at, count: _of_all(at, 0, count // at.size),
            splits=True,
        ),
        CollectiveOperation(
            "broadcast",
            RING_FACTORS["broadcast"],
            elements=lambda at, count: (count, count),
            given=lambda at, count: _at_root(at, [KnownValues(ROOT, 0, count)]),
            expected=lambda at, count: [KnownValues(ROOT, 0, count)],
        ),
        CollectiveOperation(
            "reduce",
            RING_FACTORS["reduce"],
            elements=lambda at, count: (count, count),
            expected=lambda at, count: _at_root(at, [KnownValues(None, 0, count)]),
        ),
        CollectiveOperation(
            "scatter",
            RING_FACTORS["scatter"],
            elements=lambda at, count: (count if at.rank == ROOT else 0, count // at.size),
            given=lambda at, count: _at_root(at, [KnownValues(ROOT, 0, count)]),
            expected=lambda at, count: [KnownValues(ROOT, *_block(at, count))],
            splits=True,
        ),
        CollectiveOperation(
            "gather",
            RING_FACTORS["gather"],
            elements=lambda at, count: (count // at.size, count if at.rank == ROOT else 0),
            given=lambda at, count: [KnownValues(at.rank, 0, count // at.size)],
            expected=lambda at, count: _at_root(at, _of_all(at, 0, count // at.size)),
            splits=True,
        ),
        CollectiveOperation(
            "all-to-all",
            RING_FACTORS["all-to-all"],
            elements=lambda at, count: (count, count),
            expected=lambda at, count: _of_all(at, *_block(at, count)),
            splits=True,
        ),
        CollectiveOperation(  # each rank sends to the next and receives from the previous, all at once
            "send-recv",
            RING_FACTORS["send"],
            elements=lambda at, count: (count, count),
            expected=lambda at, count: [KnownValues((at.rank - 1) % at.size, 0, count)],
        ),
        CollectiveOperation(
            "barrier",
            RING_FACTORS["barrier"],
            elements=lambda at, count: (0, 0),
            given=lambda at, count: [],
            expected=lambda at, count: [],
        ),
    )
}


def _reduce_by(operation: CollectiveOperation, reduction: str) -> CollectiveOperation:
    """Return an operation such as all-reduce with another reduction than the sum."""

    def of(blocks: list[KnownValues]) -> list[KnownValues]:
        return [replace(block, reduction=reduction) for block in blocks]

    return replace(
        operation,
        name=f"{operation.name}-{reduction}",
        reduction=reduction,
        given=lambda at, count: of(operation.given(at, count)),
        expected=lambda at, count: of(operation.expected(at, count)),
    )


# all-reduce-max and so on. Only measured if they are named, since a training reduces by sums.
REDUCTIONS = {
    operation.name: operation
    for name in ("all-reduce", "reduce-scatter", "reduce")
    for operation in (_reduce_by(OPERATIONS[name], reduction) for reduction in (MIN, MAX, PRODUCT, AVERAGE))
}
ALL_OPERATIONS = OPERATIONS | REDUCTIONS


def build_tensor(
    blocks: list[KnownValues], ranks: int, dtype: "torch.dtype", device: "torch.device | str"
) -> "torch.Tensor":
    """Return the values of these blocks, concatenated."""
    import torch

    parts = [torch.empty(0, dtype=dtype, device=device)]
    for block in blocks:
        period = (
            _reduce([_period_of_rank(rank, ranks, block.reduction) for rank in range(ranks)], block.reduction)
            if block.rank is None
            else _period_of_rank(block.rank, ranks, block.reduction)
        )
        shift = block.start % PERIOD
        repeats = (shift + block.count) // PERIOD + 1
        parts.append(period.to(dtype).to(device).repeat(repeats)[shift : shift + block.count])
    return torch.cat(parts) if len(parts) > 2 else parts[-1]


def _reduce(periods: "list[torch.Tensor]", reduction: str) -> "torch.Tensor":
    import torch

    stacked = torch.stack(periods)
    if reduction == AVERAGE:
        return stacked.sum(0) // len(periods)  # without a remainder
    reduced: torch.Tensor = {
        SUM: lambda: stacked.sum(0),
        MIN: lambda: stacked.amin(0),
        MAX: lambda: stacked.amax(0),
        PRODUCT: lambda: stacked.prod(0),
    }[reduction]()
    return reduced


def _period_of_rank(rank: int, ranks: int, reduction: str) -> "torch.Tensor":
    """Return one period of a rank's values: [0, 1, 2, 3, 4] + rank.

    From rank 16 the values cancel out, so that every type holds sums over many ranks exactly, in any order.
    The factors of a product are 1 and -1, and a 2 of one rank at each position. The terms of an average
    differ between ranks by 1, 0 and -1, which cancel out.
    """
    import torch

    values = torch.arange(PERIOD)
    if reduction == PRODUCT:
        signs = 1 - 2 * ((values + rank) % 2)
        return torch.where((values + rank) % PERIOD == 0, 2, signs) if rank < PERIOD else signs
    if reduction == AVERAGE:
        return values + 1 + (-1 if rank % 2 else 1 if rank + 1 < ranks else 0)
    return values + rank % 7 if rank < 16 else (values + rank) % PERIOD - 2


def count_wrong(output: "torch.Tensor", blocks: list[KnownValues], ranks: int) -> int:
    """Return the number of output elements that differ from the expected values.

    An average may differ by the rounding of `ranks` terms, since a back end may multiply each by 1 / ranks.
    """
    import torch

    if not blocks:
        return 0
    expected = build_tensor(blocks, ranks, output.dtype, output.device)
    if blocks[0].reduction == AVERAGE and output.is_floating_point():
        limit = ranks * PERIOD * torch.finfo(output.dtype).eps
        return int(((output - expected).abs().double() > limit).sum())
    return int((output != expected).sum())


def bandwidths_GBps(
    operation: CollectiveOperation, ranks: int, size_bytes: int, seconds: float
) -> tuple[float, float]:
    """Return algbw and busbw, in 10⁹ bytes per second."""
    algbw = size_bytes / seconds / 1e9
    return algbw, algbw * operation.factor(ranks)

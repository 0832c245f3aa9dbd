"""The collectives as a table: what lies on each rank before and after, and what a call of S bytes counts for.

S, algbw = S / time and busbw = algbw · factor are those of nccl-tests (PERFORMANCE.md). S is the whole tensor: of reduce-scatter the
input, of all-gather the output, of scatter and gather what the root has, of all-to-all what each rank has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.plan.comm_volume import RING_FACTORS

if TYPE_CHECKING:
    import torch

PERIOD = 5  # of the values along a tensor
ROOT = 0


@dataclass(frozen=True)
class GroupRank:
    """A rank in its group."""

    rank: int
    size: int


@dataclass(frozen=True)
class KnownValues:
    """`count` values of rank `of` from position `start` on, or their sums over all ranks where `of` is None."""

    of: int | None
    start: int
    count: int


@dataclass(frozen=True)
class CollectiveOperation:
    """elements: on a rank, of its input and its output, when S has `count` elements.

    given, expected: the values of input and output on a rank, block by block; none where nothing is told of it.
    """

    name: str
    factor: Callable[[int], float]  # busbw / algbw on so many ranks
    elements: Callable[[GroupRank, int], tuple[int, int]]
    expected: Callable[[GroupRank, int], list[KnownValues]]
    given: Callable[[GroupRank, int], list[KnownValues]] = lambda at, count: [KnownValues(at.rank, 0, count)]
    splits: bool = False  # S is cut into as many blocks as there are ranks


def _block(at: GroupRank, count: int) -> tuple[int, int]:
    """Where the block of a rank begins in the whole, and its length."""
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
        CollectiveOperation(  # to the next rank and from the one before, all at once
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


def tensor(
    blocks: list[KnownValues], ranks: int, dtype: "torch.dtype", device: "torch.device | str"
) -> "torch.Tensor":
    """The values of these blocks, one behind the other."""
    import torch

    whole = [torch.empty(0, dtype=dtype, device=device)]
    for block in blocks:
        once = (
            sum(map(_once, range(ranks)), torch.zeros(PERIOD, dtype=torch.int64))
            if block.of is None
            else _once(block.of)
        )
        shift = block.start % PERIOD
        times = (shift + block.count) // PERIOD + 1
        whole.append(once.to(dtype).to(device).repeat(times)[shift : shift + block.count])
    return torch.cat(whole) if len(whole) > 2 else whole[-1]


def _once(rank: int) -> "torch.Tensor":
    """The values of a rank: [0, 1, 2, 3, 4] + its number. Those of many ranks cancel out, so that every type holds their sums exactly, in
    whatever order they are added up."""
    import torch

    values = torch.arange(PERIOD)
    return values + rank % 7 if rank < 16 else (values + rank) % PERIOD - 2


def wrong(output: "torch.Tensor", blocks: list[KnownValues], ranks: int) -> int:
    """How many elements of an output are not what they must be."""
    return int((output != tensor(blocks, ranks, output.dtype, output.device)).sum()) if blocks else 0


def bandwidths_GBps(
    operation: CollectiveOperation, ranks: int, size_bytes: int, seconds: float
) -> tuple[float, float]:
    """algbw and busbw, in 10⁹ bytes a second."""
    algbw = size_bytes / seconds / 1e9
    return algbw, algbw * operation.factor(ranks)

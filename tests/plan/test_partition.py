"""Stages of a pipeline, compared with every possible partition."""

import random
from itertools import combinations, pairwise

import pytest

from paceline.errors import PlanError
from paceline.plan.partition import partition, stage_sums


def every(pieces: int, stages: int) -> list[list[int]]:
    return [[0, *cuts] for cuts in combinations(range(1, pieces), stages - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_partition_is_optimal(seed: int) -> None:
    draw = random.Random(seed)
    pieces = draw.randint(1, 9)
    stages = draw.randint(1, pieces)
    costs = [draw.choice([0, 1, 2, 3, 10, draw.random()]) for _ in range(pieces)]
    ties = [draw.randint(0, 5) for _ in range(pieces)]
    found = partition(costs, stages, ties)
    assert found in every(pieces, stages)  # contiguous, none empty, no piece dropped
    best = min(
        (max(stage_sums(costs, starts)), max(stage_sums(ties, starts))) for starts in every(pieces, stages)
    )
    assert (max(stage_sums(costs, found)), max(stage_sums(ties, found))) == pytest.approx(best)


def test_balanced_partition_beats_equal_counts() -> None:
    costs = [1, 1, 1, 1, 9, 1, 1, 9]
    assert partition(costs, 4) != [0, 2, 4, 6]
    assert max(stage_sums(costs, partition(costs, 4))) == 9 < max(stage_sums(costs, [0, 2, 4, 6]))


def test_pieces_without_cost_are_kept() -> None:
    starts = partition([0, 5, 5, 0], 4)
    assert starts == [0, 1, 2, 3]
    assert all(begin < end for begin, end in pairwise([*partition([0] * 7, 3, [4, 0, 0, 0, 0, 0, 4]), 7]))


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_pieces(stages: int) -> None:
    with pytest.raises(PlanError, match="3 pieces make 1 to 3 stages"):
        partition([1, 1, 1], stages)

"""Contiguous stages of a pipeline, balanced by what their pieces cost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import PlanError


def partition(costs: Sequence[float], stages: int, ties: Sequence[float] | None = None) -> list[int]:
    """Where each stage begins, so that the dearest stage costs as little as it can, and among such cuts the one with the largest sum
    of `ties` has as little of those as it can. Every stage has a piece or more: len(costs) >= stages. O(pieces² × stages)."""
    if not 1 <= stages <= len(costs):
        raise PlanError(f"{len(costs)} pieces make 1 to {len(costs)} stages, got {stages}")
    _, dearest = _best_starts(costs, stages, costs, float("inf"))
    return _best_starts(ties if ties is not None else costs, stages, costs, dearest)[0]


def _best_starts(
    weights: Sequence[float], stages: int, costs: Sequence[float], most: float
) -> tuple[list[int], float]:
    """The starts that make the largest sum of `weights` least where no stage may cost more than `most`, and that largest sum."""
    pieces = len(costs)
    weight, cost = ([0.0, *accumulate(map(float, values))] for values in (weights, costs))
    best = [0.0] + [float("inf")] * pieces  # of the first so many pieces in the stages so far
    chosen: list[list[int]] = []
    for stage in range(1, stages + 1):
        new, begins = [float("inf")] * (pieces + 1), [0] * (pieces + 1)
        for end in range(stage, pieces - (stages - stage) + 1):
            for begin in range(stage - 1, end):
                largest = max(best[begin], weight[end] - weight[begin])
                if largest < new[end] and cost[end] - cost[begin] <= most:
                    new[end], begins[end] = largest, begin
        best = new
        chosen.append(begins)
    starts, end = [], pieces
    for begins in reversed(chosen):
        end = begins[end]
        starts.append(end)
    return starts[::-1], best[pieces]


def stage_sums(values: Sequence[float], starts: Sequence[int]) -> list[float]:
    """The sum of each stage."""
    return [sum(values[begin:end]) for begin, end in pairwise([*starts, len(values)])]

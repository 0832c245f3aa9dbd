"""Contiguous stages of a pipeline, balanced by the costs of their pieces."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import PlanError


def partition(costs: Sequence[float], stages: int, ties: Sequence[float] | None = None) -> list[int]:
    """Return the first piece of each stage, so that the most expensive stage costs as little as possible.

    Among equal partitions, the largest sum of `ties` over a stage is as small as possible. Every stage has at
    least one piece: len(costs) >= stages. O(pieces² × stages).
    """
    if not 1 <= stages <= len(costs):
        raise PlanError(f"{len(costs)} pieces make 1 to {len(costs)} stages, got {stages}")
    _, max_cost = _best_starts(costs, stages, costs, float("inf"))
    return _best_starts(ties if ties is not None else costs, stages, costs, max_cost)[0]


def _best_starts(
    weights: Sequence[float], stages: int, costs: Sequence[float], max_cost: float
) -> tuple[list[int], float]:
    """Return the starts whose largest sum of `weights` is smallest, and that sum.

    No stage costs more than `max_cost`.
    """
    pieces = len(costs)
    weight, cost = ([0.0, *accumulate(map(float, values))] for values in (weights, costs))
    best = [0.0] + [float("inf")] * pieces  # by number of pieces in the stages so far
    chosen: list[list[int]] = []
    for stage in range(1, stages + 1):
        new, begins = [float("inf")] * (pieces + 1), [0] * (pieces + 1)
        for end in range(stage, pieces - (stages - stage) + 1):
            for begin in range(stage - 1, end):
                largest = max(best[begin], weight[end] - weight[begin])
                if largest < new[end] and cost[end] - cost[begin] <= max_cost:
                    new[end], begins[end] = largest, begin
        best = new
        chosen.append(begins)
    starts, end = [], pieces
    for begins in reversed(chosen):
        end = begins[end]
        starts.append(end)
    return starts[::-1], best[pieces]


def stage_sums(values: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Return the sum of `values` over each stage."""
    return [sum(values[begin:end]) for begin, end in pairwise([*starts, len(values)])]

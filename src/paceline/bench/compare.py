"""Two results of one kind beside each other: ratios of times, and how sure they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from paceline.bench.result import Result, Row
from paceline.errors import BenchError


@dataclass(frozen=True)
class Ratio:
    """One row of both. ratio: time in the first over time in the second; above 1 the second is the quicker one.

    spread: of the ratio, from the spreads of both times as if they were independent.
    """

    first: Row
    second: Row
    ratio: float
    spread: float


@dataclass(frozen=True)
class Comparison:
    ratios: tuple[Ratio, ...]
    only_first: int  # rows that the other one lacks
    only_second: int


def compare(first: Result, second: Result) -> Comparison:
    """Rows with the same keys. Raises BenchError where there are none."""
    if first.keys != second.keys:
        raise BenchError(
            f"rows of bench {first.kind} and of bench {second.kind} have other keys: compare two results of one bench"
        )
    timed = [
        {result.key(row): row for row in result.rows if row.get("median_s")} for result in (first, second)
    ]
    both = [key for key in timed[0] if key in timed[1]]
    if not both:
        raise BenchError(
            "the two results have no row in common: measure both with the same operations, sizes and types"
        )
    ratios = tuple(_ratio(timed[0][key], timed[1][key]) for key in both)
    return Comparison(ratios, len(timed[0]) - len(both), len(timed[1]) - len(both))


def _ratio(first: Row, second: Row) -> Ratio:
    ratio = _number(first, "median_s") / _number(second, "median_s")
    return Ratio(
        first, second, ratio, ratio * math.hypot(_number(first, "spread"), _number(second, "spread"))
    )


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def quartiles(ratios: Sequence[Ratio]) -> tuple[float, float, float]:
    """Of the ratios, lower, median and upper."""
    values = [one.ratio for one in ratios]
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = quantiles(values, n=4, method="inclusive")
    return low, median, high

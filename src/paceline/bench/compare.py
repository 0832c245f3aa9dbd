"""Compare two results of the same bench: ratios of times, and their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from paceline.bench.result import Result, Row
from paceline.errors import BenchError


@dataclass(frozen=True)
class Ratio:
    """A row that both results have.

    ratio: time in the first result over time in the second; above 1, the second is faster.
    spread: uncertainty of the ratio, from the spreads of both times, taken as independent.
    """

    first: Row
    second: Row
    ratio: float
    spread: float


@dataclass(frozen=True)
class Comparison:
    """The rows that two results share, and how many rows only one of them has."""

    ratios: tuple[Ratio, ...]
    only_first: int
    only_second: int


def compare(first: Result, second: Result) -> Comparison:
    """Compare the timed rows with equal keys. Raises BenchError if there are none."""
    if first.keys != second.keys:
        raise BenchError(
            f"results of bench {first.kind} and bench {second.kind} have different keys; "
            "compare two results of the same bench"
        )
    timed = [
        {result.key(row): row for row in result.rows if row.get("median_s")} for result in (first, second)
    ]
    shared = [key for key in timed[0] if key in timed[1]]
    if not shared:
        raise BenchError(
            "the two results have no row in common; measure both with the same operations, sizes and types"
        )
    ratios = tuple(_ratio(timed[0][key], timed[1][key]) for key in shared)
    return Comparison(ratios, len(timed[0]) - len(shared), len(timed[1]) - len(shared))


def _ratio(first: Row, second: Row) -> Ratio:
    ratio = _number(first, "median_s") / _number(second, "median_s")
    return Ratio(
        first, second, ratio, ratio * math.hypot(_number(first, "spread"), _number(second, "spread"))
    )


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def quartiles(ratios: Sequence[Ratio]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of the ratios."""
    values = [item.ratio for item in ratios]
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = quantiles(values, n=4, method="inclusive")
    return low, median, high

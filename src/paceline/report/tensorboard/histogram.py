"""Histogram: how many values of a tensor lie in each bin."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Histogram:
    """Counts of values by bin.

    limits: upper ends of the bins, which belong to them. sum_squares: sum of the squares of the values.
    """

    counts: tuple[int, ...]
    limits: tuple[float, ...]
    sum: float
    sum_squares: float
    min: float
    max: float

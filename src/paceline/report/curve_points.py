"""Points of a curve for a picture of limited width: its mean, and the band between its extremes."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.curves import BucketColumn

AXES = ("step", "samples", "time", "energy")  # energy in joules, time in seconds of training


@dataclass(frozen=True)
class CurvePoints:
    """A curve in ascending order of `x`. A point stands for all steps since the previous point.

    x: after the last step of the point. low, high, last, mean: of the finite values of its steps; None if no
    value is finite. Of `last`, None if that of the last step is not finite."""

    name: str
    axis: str
    x: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    last: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    num_steps: tuple[int, ...]


def find_points(
    column: BucketColumn,
    name: str,
    axis: str,
    x: Sequence[float],
    begin: float | None,
    end: float | None,
    limit: int,
) -> CurvePoints:
    """Return at most `limit` points of a quantity between two values of the axis, `begin` excluded.

    x: the values of the axis by bucket, ascending."""
    first = bisect.bisect_right(x, begin) if begin is not None else 0
    until = bisect.bisect_right(x, end) if end is not None else len(x)
    if until < len(x) and end is not None and (not until or x[until - 1] < end):
        until += 1  # the bucket in which the range ends
    size = max(1, -(-(until - first) // max(1, limit)))
    return group_points(column, name, axis, x, first, until, size)


def group_points(
    column: BucketColumn, name: str, axis: str, x: Sequence[float], first: int, until: int, size: int
) -> CurvePoints:
    """Return a point for each `size` buckets from `first` to `until`."""
    ends = [min(at + size, until) for at in range(first, until, size)]
    groups = column.group_all(first, until, size)
    return CurvePoints(
        name,
        axis,
        tuple(float(x[at - 1]) for at in ends),
        tuple(low if count else None for low, _, _, _, count in groups),
        tuple(high if count else None for _, high, _, _, count in groups),
        tuple(last if last - last == 0 else None for _, _, last, _, _ in groups),
        tuple(total / count if count else None for _, _, _, total, count in groups),
        tuple(count for *_, count in groups),
    )

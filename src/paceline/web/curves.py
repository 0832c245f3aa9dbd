"""The curves of a run as tables of a page."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RunError
from paceline.report.curve_points import AXES, CurvePoints, group_points
from paceline.report.curves import StepCurves
from paceline.report.run_view import RunView

MAX_CURVES = 24  # that are sent at once; others are found by their names
MAX_POINTS = 800  # of a curve
MAX_FILTER = 100  # characters
MAX_NAME = 300  # characters of the name of a curve
UNITS = {
    "samples_per_s": "samples/s",
    "step_s": "s",
    "data_s": "s",
    "loss": "",
    "grad_norm": "",
    "lr": "",
}
Columns = dict[str, list[Any]]
AXIS_UNITS = {"step": "step", "samples": "samples", "time": "s", "energy": "J"}
# The fields of a step by importance; other quantities are named losses.
ORDER = ("loss", "grad_norm", "lr", "samples_per_s", "step_s", "data_s")


@dataclass(frozen=True)
class Selection:
    """What a page shows of a run.

    filter: text that the names of the curves contain. node: number of the node whose samples are shown.
    map: title of the map of ranks or GPUs."""

    axis: str = "step"
    filter: str = ""
    node: str = ""
    map: str = ""

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise RunError(f"axis must be one of {', '.join(AXES)}")
        if max(map(len, (self.filter, self.node, self.map))) > MAX_FILTER:
            raise RunError(f"a filter has at most {MAX_FILTER} characters")


@functools.lru_cache(2**16)
def round_to(value: float | None, digits: int) -> float | None:
    """Return a value with so many significant digits, because pages need few.

    The cache is for the points of curves: all of them are rounded at each refresh, and few are new.
    """
    return None if value is None else float(f"{value:.{digits}g}")


def round_all(values: Sequence[float | None], digits: int = 6) -> list[float | None]:
    return [round_to(value, digits) for value in values]


def list_curves(view: RunView) -> list[str]:
    """Return the names of all curves: fields of steps, named losses, metrics; without very long names.

    Those of steps begin with "step:", those of metrics with "metric:"."""
    quantities = sorted(view.quantities, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    names = [f"step:{name}" for name in quantities] + [f"metric:{name}" for name in view.metrics]
    return [name for name in names if len(name) <= MAX_NAME]


def find_curve(view: RunView, key: str, axis: str, limit: int = MAX_POINTS, **range_: Any) -> CurvePoints:
    """Return a curve by its name from `list_curves`. Raises RunError for an unknown name."""
    kind, _, name = key.partition(":")
    if kind not in ("step", "metric"):
        raise RunError("the name of a curve begins with step: or metric:")
    if kind == "metric":
        return view.metric_curve(name, axis, limit)
    return view.curve(name, axis, limit=limit, **range_)


class CurveTables:
    """The points of the curves of a run as columns. Points that cannot change are kept for the next call.

    The number of buckets per point is a power of two: so it changes seldom, and all points with it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Columns] = {}  # by axis and key, the first points of curves
        self._state: tuple[StepCurves | None, int, int] = (None, 0, 0)  # to which they belong

    def build(self, view: RunView, axis: str, keys: Sequence[str]) -> dict[str, Columns]:
        """Return the columns of curves by name. A run without steps has none."""
        curves, size = view.curves, 1
        while size * MAX_POINTS < len(curves):
            size *= 2
        if self._state != (state := (curves, curves.rewinds, size)):
            self._kept, self._state = {}, state
        tables = {}
        for key in keys:
            if key.startswith("metric:"):
                tables[f"curve:{key}"] = to_columns(find_curve(view, key, axis))
            elif key.removeprefix("step:") in curves.columns:
                tables[f"curve:{key}"] = self._extend(view, axis, key, size)
        return tables

    def _extend(self, view: RunView, axis: str, key: str, size: int) -> Columns:
        """Return the columns of a curve of steps."""
        name, until = key.removeprefix("step:"), len(view.curves)
        kept = self._kept.get((axis, key), {})
        first = size * len(kept.get("x", ()))
        x = view.values_of(axis)
        new = to_columns(group_points(view.curves.columns[name], name, axis, x, first, until, size))
        table = {column: kept.get(column, []) + values for column, values in new.items()}
        if axis != "energy":  # a later sample changes how much was used until a step
            whole = max(0, until - 1) // size  # steps may still be added to the last bucket
            self._kept[axis, key] = {column: values[:whole] for column, values in table.items()}
        return table


def to_columns(points: CurvePoints) -> Columns:
    return {
        "x": round_all(points.x, 10),
        "low": round_all(points.low),
        "high": round_all(points.high),
        "mean": round_all(points.mean),
        "last": round_all(points.last),
    }

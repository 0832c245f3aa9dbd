"""The curves of a long run before all of its steps were read: evenly spaced steps."""

from collections.abc import Sequence
from typing import Any

from paceline.report.history import HistoryPoint
from paceline.report.run_view import RunView
from paceline.web.curves import MAX_POINTS, round_all

PREVIEW = "all steps of this long run are being read; until then, the curves show evenly spaced steps"
NAMES = ("loss", "samples_per_s", "step_s", "data_s")  # of the fields of a `HistoryPoint`


def build_preview(view: RunView) -> tuple[dict[str, Any], dict[str, dict[str, list[Any]]]]:
    """Return the panel of the curves and their tables, over steps."""
    keys = [f"step:{name}" for name in NAMES]
    points = view.steps
    panel = {
        "axis": "step",
        "axes": ["step"],
        "names": keys,
        "count": len(keys),
        "marks": [],
    }
    return panel, {f"curve:step:{name}": _build_table(points, name) for name in NAMES}


def _build_table(points: Sequence[HistoryPoint], name: str) -> dict[str, list[Any]]:
    size = max(1, -(-len(points) // MAX_POINTS))
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    table: dict[str, list[Any]] = {"x": [group[-1].step for group in groups]}
    columns: dict[str, list[float | None]] = {key: [] for key in ("low", "high", "mean", "last")}
    for group in groups:
        values = [value for point in group if (value := getattr(point, name)) - value == 0]
        last = getattr(group[-1], name)
        columns["low"].append(min(values, default=None))
        columns["high"].append(max(values, default=None))
        columns["mean"].append(sum(values) / len(values) if values else None)
        columns["last"].append(last if last - last == 0 else None)
    return table | {key: round_all(column) for key, column in columns.items()}

"""The prediction of a run, as `paceline profile` left it in the run folder.

A page never predicts: that takes the task of the run, whose code another user may have written.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from paceline.events import Started
from paceline.files import open_regular, reason
from paceline.plan.cost_model.compare import MEMORY_PARTS, TIME_PARTS
from paceline.run import RunFolder

MAX_BYTES = 2**20


@dataclass(frozen=True)
class StoredPrediction:
    """Predicted seconds of a step and bytes of a rank by part, each with its standard deviation.

    problem: why there are none."""

    time_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    problem: str = ""


def read_prediction(run: RunFolder, started: Started | None) -> StoredPrediction:
    """Return the prediction of the last `paceline profile` if it belongs to the present start."""
    hint = f"for a prediction, run: paceline profile {run.path}"
    try:
        with open_regular(run.profile) as file:
            tree = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return StoredPrediction(problem=f"not predicted yet; {hint}")
    except (OSError, ValueError, RecursionError) as error:
        return StoredPrediction(problem=f"cannot read {run.profile}: {reason(error)}; {hint}")
    if not isinstance(tree, dict):
        return StoredPrediction(problem=f"{run.profile} is damaged; {hint}")
    keys = ("plan", "ranks", "batch")
    if started is None or any(tree.get(key) != getattr(started, key) for key in keys):
        return StoredPrediction(problem=f"the prediction belongs to another plan; {hint}")
    time_s = _read_parts(tree.get("time_s"), TIME_PARTS)
    if not time_s:
        return StoredPrediction(problem=f"{run.profile} has no prediction; {hint}")
    return StoredPrediction(time_s, _read_parts(tree.get("memory_bytes"), MEMORY_PARTS))


def _read_parts(tree: Any, names: Any) -> dict[str, tuple[float, float]]:
    parts = {}
    for name in names:
        row = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(row, dict) and _is_amount(row.get("predicted")):
            spread: Any = row.get("spread")
            parts[name] = (float(row["predicted"]), float(spread) if _is_amount(spread) else 0.0)
    return parts


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300

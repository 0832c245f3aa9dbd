"""The prediction of a run, as `paceline profile` left it in the run folder.

A page never predicts: that takes the task of the run, whose code another user may have written.
"""

import json
import math
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

    flops: of the model on one rank in a step. peak_flops: of a device, per second. price_per_hour: of a
    device. Those that are unknown are None. problem: why there is no prediction."""

    time_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    flops: float | None = None
    peak_flops: float | None = None
    price_per_hour: float | None = None
    problem: str = ""

    def find_utilization(self, step_s: float | None) -> float | None:
        """Return the model FLOP utilization (MFU) of steps of this duration; None if it is unknown."""
        if not self.flops or not self.peak_flops or not step_s or not math.isfinite(step_s):
            return None
        return self.flops / (step_s * self.peak_flops)


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
    return StoredPrediction(
        time_s,
        _read_parts(tree.get("memory_bytes"), MEMORY_PARTS),
        flops=_read_amount(tree, "flops"),
        peak_flops=_read_amount(tree, "peak_flops"),
        price_per_hour=_read_amount(tree, "price_per_device_hour"),
    )


def _read_parts(tree: Any, names: Any) -> dict[str, tuple[float, float]]:
    parts = {}
    for name in names:
        row = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(row, dict) and _is_amount(row.get("predicted")):
            spread: Any = row.get("spread")
            parts[name] = (float(row["predicted"]), float(spread) if _is_amount(spread) else 0.0)
    return parts


def _read_amount(tree: dict[str, Any], key: str) -> float | None:
    value = tree.get(key)
    return float(value) if value is not None and _is_amount(value) else None


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300

"""Comparison of predicted and measured parts.

The tables say which parts of the planner belong to which part of the profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot

from paceline.plan.cost_model.cost import Cost, CostPart

TIME_PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("products", "attention", "other operations", "computed again"),
    "communication": (
        "tensor parallel",
        "context parallel",
        "expert parallel",
        "data parallel",
        "gathered weights",
        "pipeline sends",
        "jitter",
    ),
    "bubble": ("pipeline bubble",),
    "input": ("input",),
    "optimizer": ("optimizer",),
    "save": ("save",),
    "other": ("engines",),
}
# The planner's other parts, of the allocator and the process, are not tensors.
MEMORY_PARTS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights", "averaged weights", "main weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "computed again", "loss", "gathered", "cast weights", "communication"),
}
MAX_PROFILED_STEPS = 32  # profiled together; local SGD requires a whole period
MIN_SHARE = 0.01  # of a step; the ratio of a smaller part is noise


@dataclass(frozen=True)
class ComparisonRow:
    """A part of the profile, measured and predicted.

    predicted: None without a prediction. spread: its standard deviation. Both are in the unit of `measured`.
    """

    name: str
    measured: float
    predicted: float | None = None
    spread: float = 0.0

    @property
    def off(self) -> float:
        """Predicted minus measured."""
        return (self.predicted or 0.0) - self.measured

    @property
    def error(self) -> float | None:
        """`off` as a share of `measured`; None if there is no prediction."""
        return self.off / self.measured if self.predicted is not None and self.measured else None


def compare_parts(
    table: Mapping[str, tuple[str, ...]],
    measured: Mapping[str, float],
    predicted: tuple[CostPart, ...] | None,
) -> list[ComparisonRow]:
    """Return a row for each part that was measured or predicted.

    Parts unknown to the planner, such as input, count as predicted 0.
    """
    known = {part.name: part for part in predicted or ()}
    rows = []
    for name, value in measured.items():
        parts = [known[part] for part in table.get(name, ()) if part in known]
        total = sum(part.value for part in parts) if predicted is not None else None
        rows.append(ComparisonRow(name, value, total, hypot(*(part.value * part.error for part in parts))))
    return [row for row in rows if row.measured or row.predicted]


def find_largest_difference(rows: list[ComparisonRow]) -> ComparisonRow | None:
    """Return the part with the largest difference in seconds or bytes, or None without predictions."""
    return max((row for row in rows if row.predicted is not None), key=lambda row: abs(row.off), default=None)


def measured_ratios(seconds: Mapping[str, float], cost: Cost) -> dict[str, float]:
    """Return measured / predicted of the parts that both have and that are not negligible."""
    negligible = MIN_SHARE * min(cost.step_s, sum(seconds.values()))
    rows = compare_parts(TIME_PARTS, seconds, cost.time.parts)
    return {
        row.name: row.measured / row.predicted
        for row in rows
        if row.predicted and min(row.measured, row.predicted) > negligible
    }

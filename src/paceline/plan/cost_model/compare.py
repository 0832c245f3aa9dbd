"""What was predicted beside what was measured, part by part: one table says which parts of the planner are which of the profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot

from paceline.plan.cost_model.cost import Cost, CostPart

TIME_PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("products", "attention", "other operations", "computed again"),
    "communication": (
        "tensor parallel",
        "context parallel",
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
MEMORY_PARTS: Mapping[
    str, tuple[str, ...]
] = {  # what the planner has beside these, of the allocator and the process, is no tensor's
    "weights": ("weights", "main weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "computed again", "loss", "gathered", "cast weights", "communication"),
}
MAX_PROFILED_STEPS = 32  # that are profiled together: under local SGD a whole period
MIN_SHARE = 0.01  # of a step: the ratio of a part that is smaller says nothing


@dataclass(frozen=True)
class ComparisonRow:
    """`predicted`: None where nothing was; `spread`: its standard deviation, both in the unit of `measured`."""

    name: str
    measured: float
    predicted: float | None = None
    spread: float = 0.0

    @property
    def off(self) -> float:
        """Predicted less measured: below 0 where more was measured."""
        return (self.predicted or 0.0) - self.measured

    @property
    def error(self) -> float | None:
        """The same as a share of what was measured."""
        return self.off / self.measured if self.predicted is not None and self.measured else None


def compare_parts(
    table: Mapping[str, tuple[str, ...]],
    measured: Mapping[str, float],
    predicted: tuple[CostPart, ...] | None,
) -> list[ComparisonRow]:
    """A row for each part that was measured or predicted. What the planner says nothing of, as input, is predicted to take nothing."""
    known = {part.name: part for part in predicted or ()}
    rows = []
    for name, value in measured.items():
        parts = [known[one] for one in table[name] if one in known]
        total = sum(part.value for part in parts) if predicted is not None else None
        rows.append(ComparisonRow(name, value, total, hypot(*(part.value * part.error for part in parts))))
    return [row for row in rows if row.measured or row.predicted]


def find_largest_difference(rows: list[ComparisonRow]) -> ComparisonRow | None:
    """The part that is furthest off, in seconds or bytes."""
    return max((row for row in rows if row.predicted is not None), key=lambda row: abs(row.off), default=None)


def measured_ratios(seconds: Mapping[str, float], cost: Cost) -> dict[str, float]:
    """Measured over predicted, of the parts that are there in both and matter."""
    least = MIN_SHARE * min(cost.step_s, sum(seconds.values()))
    rows = compare_parts(TIME_PARTS, seconds, cost.time.parts)
    return {
        row.name: row.measured / row.predicted
        for row in rows
        if row.predicted and min(row.measured, row.predicted) > least
    }

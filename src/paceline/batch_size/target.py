"""The target of a comparison of batches, such as accuracy>=0.97, and when a training reaches it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec import abbreviate

TARGET = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Target:
    """A metric of the evaluations, and the value that it must reach."""

    name: str
    value: float
    is_maximum: bool  # whether larger values are better

    @property
    def metric(self) -> str:
        """The metric as `stop.metric` has it."""
        return f"{'max' if self.is_maximum else 'min'} {self.name}"

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.is_maximum else '<='} {self.value:.15g}"

    def is_reached(self, value: float) -> bool:
        """Return whether the value of an evaluation reaches the target."""
        return value >= self.value if self.is_maximum else value <= self.value

    def best(self, values: Sequence[float]) -> float | None:
        """Return the best of some values; None if none is a number."""
        known = [value for value in values if not math.isnan(value)]
        return max(known, default=None) if self.is_maximum else min(known, default=None)

    def find_crossing(self, evaluations: Sequence[tuple[int, float]]) -> float | None:
        """Return the step at which the metric reaches the target; None if it never does.

        evaluations: pairs of step and value, in their order. Between two evaluations the metric is taken for
        linear, so that the result does not depend on how often a training is evaluated.
        """
        before: tuple[int, float] | None = None
        for step, value in evaluations:
            if self.is_reached(value):
                if before is None or not math.isfinite(value - before[1]):
                    return float(step)
                return before[0] + (step - before[0]) * (self.value - before[1]) / (value - before[1])
            before = step, value
        return None


def parse_target(text: str) -> Target:
    """Return the target that `text` names. Raises SpecError."""
    match = TARGET.fullmatch(text)
    try:
        value = float(match[3]) if match is not None else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise SpecError(
            f"--until must be a metric and its value, such as 'accuracy>=0.97' or 'loss<=0.1', got "
            f"{abbreviate(text)}"
        )
    return Target(match[1], value, match[2].startswith(">"))

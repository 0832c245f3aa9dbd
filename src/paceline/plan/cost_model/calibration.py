"""Correction factors for the parts of predictions, from runs on the same cluster."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.cluster.facts import CalibrationRecord, Fact
from paceline.plan.cost_model.compare import TIME_PARTS, measured_ratios
from paceline.plan.cost_model.cost import Cost


@dataclass(frozen=True)
class Factor:
    """Correction factor of one part.

    A mean over few runs is shrunk: n runs count n / (n + 1), the prediction 1 / (n + 1).
    """

    runs: int
    mean: float  # of log(measured / predicted)
    scatter: float  # sum of squared distances to the mean

    @property
    def value(self) -> float:
        return math.exp(self.mean * self.runs / (self.runs + 1))

    def error(self, before: float) -> float:
        """Return the standard deviation after the runs; `before`: without them.

        The part of the mean that is shrunk away counts as error.
        """
        return math.hypot(
            math.sqrt((before**2 + self.scatter) / (self.runs + 1)), self.mean / (self.runs + 1)
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """Factors by part of a prediction.

    parts: parts of the planner that any run had; parts too short to measure have no factor. ranks: most ranks
    of any run.
    """

    factors: Mapping[str, Factor]
    parts: frozenset[str]
    ranks: int

    def beyond(self, parts: Iterable[str], ranks: int) -> tuple[str, ...]:
        """Return sentences about what a prediction has that no run had."""
        unseen = [part for part in parts if part not in self.parts]
        names = " or ".join(f'"{part}"' for part in unseen)
        sentences = [f"no profiled run here had the part {names} of a step"] if unseen else []
        return (
            *sentences,
            *(
                [f"{ranks} ranks are more than the {self.ranks} of any run here"]
                if ranks > self.ranks
                else []
            ),
        )


def fit_calibration(records: Iterable[CalibrationRecord]) -> Calibration | None:
    """Return the calibration from records of runs, or None without records."""
    logs: dict[str, list[float]] = {}
    records = list(records)
    for record in records:
        for name, ratio in record.ratios.items():
            for part in set(TIME_PARTS.get(name, ())) & set(record.parts):
                logs.setdefault(part, []).append(math.log(ratio.value))
    if not records:
        return None
    factors = {}
    for part, ratios in logs.items():
        mean = statistics.mean(ratios)
        factors[part] = Factor(len(ratios), mean, sum((ratio - mean) ** 2 for ratio in ratios))
    return Calibration(
        factors,
        frozenset(part for record in records for part in record.parts),
        max(record.ranks for record in records),
    )


def build_record(
    run: str, plan: str, ranks: int, seconds: Mapping[str, float], cost: Cost
) -> CalibrationRecord:
    """Return the record of a run: what its parts took, divided by what was predicted.

    run: a name that no other run has. seconds: measured, by part. cost: predicted without any calibration.
    """
    ratios = measured_ratios(seconds, cost)
    return CalibrationRecord(
        run=run,
        plan=plan,
        ranks=ranks,
        parts=tuple(part.name for part in cost.time.parts),
        ratios={part: Fact(value=ratio, source="measured") for part, ratio in ratios.items()},
    )

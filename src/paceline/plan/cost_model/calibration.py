"""What runs on a cluster showed of its predictions, as factors on the parts of later ones."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.cluster.facts import CalibrationRecord
from paceline.plan.cost_model.compare import TIME_PARTS


@dataclass(frozen=True)
class Factor:
    """Of one part. A mean over few runs is not taken in whole: n of them count as n of n + 1, the one more being what was predicted."""

    runs: int
    mean: float  # of the logarithms of measured over predicted
    scatter: float  # sum of their squared distances to it

    @property
    def value(self) -> float:
        return math.exp(self.mean * self.runs / (self.runs + 1))

    def error(self, before: float) -> float:
        """Standard deviation, when it was so much without any run: of runs and that one together, and what is not taken in yet."""
        return math.hypot(
            math.sqrt((before**2 + self.scatter) / (self.runs + 1)), self.mean / (self.runs + 1)
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """`parts`: of the planner, that any run had; those too short to say anything have no factor. `ranks`: most of any run."""

    factors: Mapping[str, Factor]
    parts: frozenset[str]
    ranks: int

    def beyond(self, parts: Iterable[str], ranks: int) -> tuple[str, ...]:
        """What of a prediction is outside of what was seen, in words."""
        unseen = [part for part in parts if part not in self.parts]
        words = [f"no profiled run here had {' or '.join(unseen)}"] if unseen else []
        return (
            *words,
            *(
                [f"{ranks} ranks are more than the {self.ranks} of any run here"]
                if ranks > self.ranks
                else []
            ),
        )


def fit_calibration(records: Iterable[CalibrationRecord]) -> Calibration | None:
    """None where there are no records."""
    logs: dict[str, list[float]] = {}
    records = list(records)
    for record in records:
        for name, ratio in record.ratios.items():
            for part in set(TIME_PARTS.get(name, ())) & set(record.parts):
                logs.setdefault(part, []).append(math.log(ratio.value))
    if not records:
        return None
    factors = {}
    for part, found in logs.items():
        mean = statistics.mean(found)
        factors[part] = Factor(len(found), mean, sum((one - mean) ** 2 for one in found))
    return Calibration(
        factors,
        frozenset(part for record in records for part in record.parts),
        max(record.ranks for record in records),
    )

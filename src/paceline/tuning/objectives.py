"""Objectives of a study, as losses: smaller is better."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.tuning.journal import Metrics, Trial


@dataclass(frozen=True)
class StudyObjective:
    """An objective of a study."""

    direction: Literal["min", "max"]
    name: str

    def __str__(self) -> str:
        return f"{self.direction} {self.name}"

    def as_loss(self, value: float) -> float:
        """Return the value such that smaller is better."""
        return value if self.direction == "min" else -value

    def read_loss(self, metrics: Metrics) -> float | None:
        """Return the loss of these metrics, or None if they lack it or it is not finite."""
        value = metrics.get(self.name)
        return self.as_loss(value) if value is not None else None


def parse_objectives(metrics: Sequence[str]) -> list[StudyObjective]:
    """Return the objectives of texts such as `max accuracy`, whose form was checked."""
    parts = [metric.partition(" ") for metric in metrics]
    return [StudyObjective("max" if direction == "max" else "min", name) for direction, _, name in parts]


def read_losses(objectives: Sequence[StudyObjective], trial: Trial) -> tuple[float, ...] | None:
    """Return the losses at the end of the last stage of a trial, or None if one is missing."""
    losses = [loss for goal in objectives if (loss := goal.read_loss(trial.metrics)) is not None]
    return tuple(losses) if len(losses) == len(objectives) else None

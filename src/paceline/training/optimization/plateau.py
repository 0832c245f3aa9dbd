"""The schedule `plateau`: the learning rate falls when a metric of the evaluations stops to improve."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from paceline.errors import SpecError
from paceline.spec import Schedule, Spec
from paceline.training.stop_policy import read_score

DEFAULT_PATIENCE = 3  # evaluations


@dataclass(frozen=True)
class PlateauState:
    """The evaluations so far, and the factor on the learning rate. Each checkpoint contains it."""

    metric: str  # such as "min loss"
    best: float | None = None  # score, lower being better
    waited: int = 0  # evaluations in a row without a better score
    factor: float = 1.0


def plateau_metric(spec: Spec) -> str:
    """Return the metric that decides: min NAME or max NAME."""
    return spec.schedule.metric or spec.save.best


def check_plateau(spec: Spec, prefixes: Collection[str]) -> None:
    """Raise SpecError if the schedule follows a metric and no split is evaluated."""
    if spec.schedule.name == "plateau" and not prefixes:
        raise SpecError(
            "schedule plateau requires evaluations, but the task has no validation split; return samples for "
            "dataset('validation'), or use another schedule"
        )


def add_evaluation(schedule: Schedule, state: PlateauState, metrics: Mapping[str, float]) -> PlateauState:
    """Return the state after an evaluation. Raises SpecError if it lacks the metric."""
    score = read_score(metrics, state.metric, "schedule.metric")
    if not math.isnan(score) and (state.best is None or score < state.best - (schedule.min_delta or 0.0)):
        return replace(state, best=score, waited=0)
    patience = schedule.patience if schedule.patience is not None else DEFAULT_PATIENCE
    if state.waited + 1 < patience:
        return replace(state, waited=state.waited + 1)
    return replace(state, waited=0, factor=max(schedule.floor, state.factor * schedule.factor))

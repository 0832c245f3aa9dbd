"""What was predicted of the trials of a study, compared with what was then measured."""

import statistics
from collections import Counter
from collections.abc import Iterator

from paceline.tuning.journal import StudyState, Trial
from paceline.units import several, without_controls

COMPARED = ("step_s", "time", "memory")
SHOWN_PROBLEMS = 3


def describe_predictions(state: StudyState) -> Iterator[str]:
    """Yield lines: the predicted share of each measured quantity, and why trials were not predicted."""
    parts = []
    for name in COMPARED:
        shares = sorted(_list_shares(state, name))
        if shares:
            median = statistics.median(shares)
            parts.append(f"{name} {median:.2g} ({shares[0]:.2g} to {shares[-1]:.2g})")
    if parts:
        yield f"predicted / measured, median and range: {', '.join(parts)}"
    problems = Counter(trial.not_predicted for trial in state.trials.values() if trial.not_predicted)
    for problem, count in problems.most_common(SHOWN_PROBLEMS):
        yield f"{several(count, 'trial')} without a prediction: {without_controls(problem)}"


def _list_shares(state: StudyState, name: str) -> Iterator[float]:
    """Yield the predicted share of a quantity of each complete trial that has both values."""
    for trial in state.trials.values():
        measured = _read_measured(trial, name)
        if trial.state == "complete" and measured and name in trial.predicted:
            yield trial.predicted[name] / measured


def _read_measured(trial: Trial, name: str) -> float | None:
    return trial.stages[-1].metrics.get(name) if trial.stages else None

"""The results of a study: the best trials, and the table of all trials as text and CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import tomli_w
from rich.table import Table

from paceline.errors import RunError
from paceline.files import write_whole
from paceline.tuning.definition import StudyDefinition, override_request
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.objectives import StudyObjective, read_losses
from paceline.tuning.space import Space
from paceline.units import format_seconds, several, without_controls

SHOWN_TRIALS = 20


def read_result(objectives: Sequence[StudyObjective], trial: Trial) -> tuple[float, ...] | None:
    """Return the losses of a complete trial, or None."""
    return read_losses(objectives, trial) if trial.state == "complete" else None


def has_only_failures(state: StudyState) -> bool:
    """Return whether trials were started, and each of them failed."""
    started = [trial for trial in state.trials.values() if trial.state != "refused"]
    return bool(started) and all(trial.state == "failed" for trial in started)


def check_values(space: Space, state: StudyState, where: str) -> None:
    """Raise RunError for a trial whose values do not belong to the space, which `where` defines."""
    for trial in state.trials.values():
        if not space.contains(trial.values):
            raise RunError(
                f"trial {trial.number} has values outside of the space of {where}; restore the space, or "
                "start a new study"
            )


def find_front(objectives: Sequence[StudyObjective], state: StudyState) -> list[Trial]:
    """Return the complete trials that no other is better than in all objectives: with one, the best."""
    losses = [
        (values, trial)
        for trial in state.trials.values()
        if (values := read_result(objectives, trial)) is not None
    ]
    front: list[tuple[tuple[float, ...], Trial]] = []
    for values, trial in sorted(losses, key=lambda entry: (entry[0], entry[1].number)):
        if not any(all(map(float.__le__, other, values)) for other, _ in front):
            front.append((values, trial))
    return [trial for _, trial in front]


def order_trials(objectives: Sequence[StudyObjective], state: StudyState) -> list[Trial]:
    """Return all trials, the best first; then those without a result, by number."""
    front = {trial.number for trial in find_front(objectives, state)}

    def key(trial: Trial) -> tuple[Any, ...]:
        losses = read_result(objectives, trial)
        return (losses is None, trial.number not in front, losses or (), trial.number)

    return sorted(state.trials.values(), key=key)


def write_best(folder: StudyFolder, definition: StudyDefinition, state: StudyState) -> Trial | None:
    """Write the request of the best trial as best.toml, and return the trial.

    With several objectives it is the trial of the Pareto front that is best in the first. The request has
    the ranks and threads of the trial, so that a training of it computes the same bits.
    """
    front = find_front(definition.objectives, state)
    if not front:
        return None
    best = front[0]
    overrides = definition.space.to_overrides(best.values)
    if "threads" not in definition.request:
        overrides = {"threads": definition.search.threads} | overrides
    place = {"ranks": best.ranks, "plan": best.plan}
    overrides |= {key: value for key, value in place.items() if value is not None}
    request = override_request(definition.request, overrides)
    write_whole(folder.best, tomli_w.dumps(request))
    return best


def format_value(value: Any) -> str:
    """Return a value of a parameter or metric with four digits."""
    return (
        f"{value:.4g}" if isinstance(value, float) else "" if value is None else without_controls(str(value))
    )


def format_trial(definition: StudyDefinition, trial: Trial) -> str:
    """Return a line for a trial that is over."""
    values = " ".join(f"{name}={format_value(value)}" for name, value in trial.values.items())
    if trial.state == "complete":
        result = ", ".join(
            f"{goal.name} {format_value(trial.metrics[goal.name])}" for goal in definition.objectives
        )
        return f"trial {trial.number}: {result} ({format_seconds(trial.seconds)}) with {values}"
    sentence = without_controls(trial.message.splitlines()[0]) if trial.message else ""
    return f"trial {trial.number}: {trial.state}: {sentence} with {values}"


def count_states(state: StudyState) -> str:
    """Return `12 trials: 10 complete, 2 failed`."""
    states = [trial.state for trial in state.trials.values()]
    parts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(sorted(states)))
    return f"{several(len(states), 'trial')}: {parts}" if states else "no trials"


def build_table(definition: StudyDefinition, state: StudyState, limit: int = SHOWN_TRIALS) -> Table:
    """Return the best trials as a table."""
    objectives = definition.objectives
    names = [parameter.name for parameter in definition.space.parameters]
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("trial", *(goal.name for goal in objectives), *names, "time", "state"):
        table.add_column(title, justify="left" if title == "state" else "right", overflow="fold")
    front = {trial.number for trial in find_front(objectives, state)}
    for trial in order_trials(objectives, state)[:limit]:
        table.add_row(
            f"{trial.number}{'*' if trial.number in front else ''}",
            *(format_value(trial.metrics.get(goal.name)) for goal in objectives),
            *(format_value(trial.values.get(name)) for name in names),
            format_seconds(trial.seconds) if trial.seconds else "",
            trial.state,
        )
    return table


def format_csv(definition: StudyDefinition, state: StudyState) -> str:
    """Return all trials as CSV: a row for each, with values, metrics, cost and state."""
    names = [parameter.name for parameter in definition.space.parameters]
    metrics = sorted({name for trial in state.trials.values() for name in trial.metrics})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    own = ("state", "ranks", "samples", "seconds", "message", "not_predicted")
    writer.writerow(["trial", *names, *(f"metric.{name}" for name in metrics), *own])
    for trial in state.trials.values():
        writer.writerow(
            [
                trial.number,
                *(trial.values.get(name, "") for name in names),
                *(trial.metrics.get(name, "") for name in metrics),
                trial.state,
                trial.ranks or "",
                trial.stages[-1].samples if trial.stages else "",
                round(trial.seconds, 3),
                trial.message.splitlines()[0] if trial.message else "",
                trial.not_predicted,
            ]
        )
    return text.getvalue()

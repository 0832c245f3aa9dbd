"""A study as it is now, for a page that shows it live. The code of its task is not imported."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.errors import Error, SpecError
from paceline.spec import describe_error
from paceline.tuning.definition import Search, read_definition
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import Reached, StudyState, read_state
from paceline.tuning.objectives import StudyObjective, parse_objectives
from paceline.tuning.report.results import count_states, find_front, format_value, order_trials
from paceline.units import without_controls

MAX_ROWS = 200  # the best trials
MAX_POINTS = 2000  # of the curve
MAX_TEXT = 200  # characters of a message


class StudyWatch:
    """Returns the panel of a study; the same object as long as its files are the same."""

    def __init__(self, folder: StudyFolder):
        self._folder = folder
        self._signature: object = None
        self._panel: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the panel; with the reason under "problem" if it cannot be read."""
        signature = [_sign(path) for path in (self._folder.definition, self._folder.journal)]
        if signature != self._signature:
            self._signature = signature
            try:
                self._panel = build_study_panel(self._folder)
            except Error as error:
                self._panel = {"problem": without_controls(str(error))}
        return self._panel


def _sign(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def build_study_panel(folder: StudyFolder) -> dict[str, Any]:
    """Return counts, the curve of the best result, and the best trials as rows. Raises an Error."""
    _, ranges, keys = read_definition(folder.definition)
    try:
        search = Search.model_validate(keys)
    except ValidationError as error:
        raise SpecError(describe_error(error, list(Search.model_fields), "key of [tune]")) from error
    state = read_state(folder.journal)
    objectives = parse_objectives(search.metrics)
    names = list(ranges) or sorted({name for trial in state.trials.values() for name in trial.values})
    front = {trial.number for trial in find_front(objectives, state)}
    rows = [
        [
            trial.number,
            trial.number in front,
            trial.state,
            [trial.metrics.get(goal.name) for goal in objectives],
            [format_value(trial.values.get(name)) for name in names],
            trial.seconds,
            without_controls(trial.message)[:MAX_TEXT],
        ]
        for trial in order_trials(objectives, state)[:MAX_ROWS]
    ]
    return {
        "name": without_controls(folder.path.resolve().name),
        "counts": count_states(state),
        "planned": search.trials,
        "goals": [without_controls(str(goal)) for goal in objectives],
        "search": f"sampler {search.sampler}, scheduler {search.scheduler}",
        "parameters": [without_controls(name) for name in names],
        "rows": rows,
        "curve": build_curve(state, objectives[0]),
    }


def build_curve(state: StudyState, objective: StudyObjective) -> dict[str, list[Any]]:
    """Return the result of each trial that was trained to its end, in their order, and the best so far."""
    complete = {trial.number for trial in state.trials.values() if trial.state == "complete"}
    last = {event.trial: event for event in state.events if isinstance(event, Reached)}
    best: float | None = None
    columns: dict[str, list[Any]] = {"trial": [], "value": [], "best": []}
    for event in last.values():
        loss = objective.read_loss(state.trials[event.trial].metrics)
        if event.trial not in complete or loss is None:
            continue
        best = loss if best is None else min(best, loss)
        columns["trial"].append(event.trial)
        columns["value"].append(objective.as_loss(loss))
        columns["best"].append(objective.as_loss(best))
    stride = -(-len(columns["trial"]) // MAX_POINTS) or 1
    return {name: values[::-1][::stride][::-1] for name, values in columns.items()}

"""`paceline.tune`: suggests values for a loop that the user writes, and learns from its results."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.errors import RunError, SpecError
from paceline.files import reason
from paceline.spec import describe_error, suggest
from paceline.tuning.definition import Search, StudyDefinition
from paceline.tuning.journal import (
    Finished,
    JournalWriter,
    Launched,
    Reached,
    StudyEvent,
    StudyState,
    Suggested,
    read_state,
)
from paceline.tuning.optuna_needs import NEEDS, check_sampler
from paceline.tuning.parameter import parse_parameter
from paceline.tuning.report.results import check_values, find_front
from paceline.tuning.samplers.table import SAMPLERS
from paceline.tuning.space import build_space


@dataclass
class AskedTrial:
    """A trial of `paceline.tune`: its number and its values by name. `trial["lr"]` is one of them."""

    number: int
    values: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a parameter. A parameter whose condition does not hold raises KeyError."""
        return self.values[name]

    def report(self, **metrics: float) -> None:
        """Set the results of the trial, by name. A later call adds to an earlier one."""
        for name, value in metrics.items():
            try:
                self.metrics[name] = float(value)
            except (TypeError, ValueError):
                raise SpecError(
                    f"trial.report({name}=…) must be a number, got {type(value).__name__}"
                ) from None


class Tuning:
    """Iterates over the trials of `paceline.tune`. `best` is the best trial so far, or None."""

    def __init__(self, definition: StudyDefinition, journal: Path | None):
        self._definition, self._journal = definition, journal
        self._state = StudyState()
        if journal is not None:
            self._read(journal)

    def _read(self, journal: Path) -> None:
        """Read the trials so far. Raises RunError if they are those of another search."""
        self._state = read_state(journal)
        check_values(self._definition.space, self._state, "paceline.tune()")
        for trial in self._state.trials.values():
            for goal in self._definition.objectives:
                if trial.state == "complete" and goal.name not in trial.metrics:
                    raise RunError(
                        f"trial {trial.number} of {journal} has no {goal.name}; use another journal"
                    )

    @property
    def trials(self) -> list[AskedTrial]:
        """All complete trials, in the order of their numbers."""
        return [
            AskedTrial(trial.number, trial.values, _finite(trial.metrics))
            for trial in self._state.trials.values()
            if trial.state == "complete"
        ]

    @property
    def best(self) -> AskedTrial | None:
        """The best trial so far; of several objectives, the best in the first on the Pareto front."""
        front = find_front(self._definition.objectives, self._state)
        return AskedTrial(front[0].number, front[0].values, _finite(front[0].metrics)) if front else None

    def __iter__(self) -> Iterator[AskedTrial]:
        with contextlib.ExitStack() as at_end:
            writer = None
            if self._journal is not None:
                writer = JournalWriter(self._journal, is_locked=True)
                at_end.callback(writer.close)
                self._read(self._journal)
            while (number := self._next()) is not None:
                yield from self._run(number, writer)

    def _next(self) -> int | None:
        """Return the number of a trial that was interrupted, or of a new one."""
        for number, trial in self._state.trials.items():
            if not trial.is_over:
                return number
        has_more = len(self._state.trials) < self._definition.search.trials
        return self._state.next_number if has_more else None

    def _run(self, number: int, writer: JournalWriter | None) -> Iterator[AskedTrial]:
        search = self._definition.search
        if number not in self._state.trials:
            values = SAMPLERS[search.sampler](self._definition, self._state, number)
            self._record(Suggested(trial=number, values=values), writer)
        if self._state.trials[number].stages:  # interrupted after its results were recorded
            self._finish(number, writer)
            return
        self._record(Launched(trial=number, ranks=1), writer)
        trial = AskedTrial(number, dict(self._state.trials[number].values))
        yield trial
        if not trial.metrics:
            self._record(Finished(trial=number, state="failed", message="nothing was reported"), writer)
            return
        for goal in self._definition.objectives:
            if goal.name not in trial.metrics:
                raise SpecError(
                    f"metric {str(goal)!r}: trial.report() was not given {goal.name}"
                    f"{suggest(goal.name, trial.metrics)}"
                )
        metrics = {name: value if _is_finite(value) else None for name, value in trial.metrics.items()}
        self._record(Reached(trial=number, samples=0, metrics=metrics, seconds=0.0), writer)
        self._finish(number, writer)

    def _finish(self, number: int, writer: JournalWriter | None) -> None:
        """Finish a trial whose results are recorded."""
        metrics = self._state.trials[number].metrics
        failed = any(metrics[goal.name] is None for goal in self._definition.objectives)
        state, why = ("failed", "a result is not a finite number") if failed else ("complete", "")
        self._record(Finished(trial=number, state=state, message=why), writer)  # type: ignore[arg-type]

    def _record(self, event: StudyEvent, writer: JournalWriter | None) -> None:
        if writer is not None:
            writer.write(event)
        self._state.apply(event)


def tune(
    space: Mapping[str, Any],
    metric: str | Sequence[str] = "min loss",
    *,
    trials: int | None = None,
    sampler: str = "random",
    seed: int = 0,
    journal: Path | str | None = None,
) -> Tuning:
    """Return an iterable of trials whose results you report.

        for trial in paceline.tune({"lr": "log:1e-4:1e-1", "width": "int:8:64:8"}, "max accuracy", trials=20):
            trial.report(accuracy=train_and_evaluate(trial["lr"], trial["width"]))

    A loop body that reports nothing makes its trial a failed one.

    space: the range of each parameter, as for `paceline tune --space`, or a list of its values.
    metric: the objective, `min NAME` or `max NAME`, or several of them.
    trials: number of trials [default: 20, or the whole grid].
    sampler: random, quasi-random, grid, or of Optuna tpe, gp, cma-es, nsga2.
    seed: of the sampler.
    journal: a file that keeps the trials. If it exists, the search continues after its last complete trial.
    One process at a time can use it.

    Raises SpecError for wrong arguments and for a report that lacks the metric, and RunError if the journal
    cannot be read or written, if another process uses it, or if it is that of another search.
    """
    if not isinstance(space, Mapping) or not space:
        raise SpecError(f"space must be a dict of ranges by name, got {space!r:.60}")
    parameters = [parse_parameter(str(name), f"set.{name}", None, text) for name, text in space.items()]
    built = build_space(parameters)
    if sampler == "grid":
        trials = trials if trials is not None else built.count_grid()
    keys = {"sampler": sampler, "seed": seed, "trials": trials}
    given = {key: value for key, value in keys.items() if value is not None}
    try:
        metrics = (metric,) if isinstance(metric, str) else tuple(metric)
        search = Search.model_validate({"metrics": metrics, **given})
    except ValidationError as error:
        raise SpecError(describe_error(error, list(Search.model_fields), "argument")) from error
    if sampler in NEEDS:
        check_sampler(sampler, len(search.metrics))
    if sampler == "grid" and search.trials > built.count_grid():
        raise SpecError(f"the grid has {built.count_grid()} combinations, got trials={trials}; use fewer")
    path = Path(journal) if journal is not None else None
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {path.parent}: {reason(error)}") from error
    return Tuning(StudyDefinition({}, dict(space), search, built), path)


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}

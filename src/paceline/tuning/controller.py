"""The controller of a study: asks the sampler, starts trials, and writes what happens to the journal."""

import contextlib
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paceline import events
from paceline.errors import RunError, SpecError
from paceline.events import Evaluated, Saved
from paceline.launch.signals import STOPPED, Interrupt
from paceline.run import RunFolder
from paceline.spec import suggest
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.executors.background_predictions import BackgroundPredictions, TrialPrediction
from paceline.tuning.executors.pool import POLL_S, Executor, RunningTrial
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import (
    Exploited,
    Finished,
    JournalWriter,
    Launched,
    Predicted,
    Reached,
    StudyState,
    Suggested,
    Trial,
    read_state,
)
from paceline.tuning.measured_cost import WHY_MISSING, measure_cost, read_price
from paceline.tuning.optuna_needs import NEEDS
from paceline.tuning.outcome import (
    MEASURED,
    describe_failure,
    is_trained,
    measure_seconds,
    read_metrics,
)
from paceline.tuning.prediction.quantities import PREFIX, describe_nearest
from paceline.tuning.preparation import NOT_STARTED, Preparation, read_values
from paceline.tuning.report.results import check_values
from paceline.tuning.samplers.table import SAMPLERS
from paceline.tuning.schedulers.median_rule import EvaluationCurve, is_hopeless
from paceline.tuning.schedulers.population import copy_checkpoint, list_exploits
from paceline.tuning.schedulers.rungs import choose_trial, count_all_trials, has_all_trials, is_at_end
from paceline.units import parse_duration_s, several

IDENTICAL_FAILURES = 3  # in a row end a study
REFUSED_IN_A_ROW = 50
AHEAD = 4  # trials that are prepared while all ranks are busy
CHECK_S = 0.5  # between looks at the first evaluation
LOCK_S = 0.5  # for another controller to end
Report = Callable[[StudyState, Trial], None]  # called when a trial is over


class Controller:
    """Runs the trials of a study until all are over, or it is asked to stop.

    A context manager, which holds the lock of the study. Raises RunError if another controller holds it.
    definition: of the study, with the threads that were chosen when it started.
    """

    def __init__(self, folder: StudyFolder, definition: StudyDefinition, report: Report):
        self._folder, self.definition, self._report = folder, definition, report
        self._is_metric_known = False  # whether a trial had all metrics of the study
        self._checked, self._price = 0.0, read_price()
        self._curves: dict[int, EvaluationCurve] = {}
        self._begin: dict[int, int] = {}  # position of the first event of the training of a trial

    def __enter__(self) -> "Controller":
        with contextlib.ExitStack() as on_error:
            self._lock = on_error.enter_context(_lock(self._folder))
            self.state = read_state(self._folder.journal)
            check_values(self.definition.space, self.state, "study.toml")
            self._is_metric_known = any(trial.state == "complete" for trial in self.state.trials.values())
            self._journal = JournalWriter(self._folder.journal)
            on_error.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._journal.close()
        self._lock.close()

    def run(self, executor: Executor) -> bool:
        """Run the trials. Return whether all of them are over; False after a request to stop or max_time.

        Raises SpecError for a metric that the task does not have, and RunError if trials fail identically.
        """
        limit = self.definition.search.max_time
        deadline = time.monotonic() + (parse_duration_s(limit) if limit is not None else math.inf)
        with Interrupt() as interrupt, executor:
            self.definition = self.definition.choose_threads(executor.cores_per_rank)
            self.definition.write(self._folder.definition)  # --resume may have changed it, too
            with (
                Preparation(self._folder, self.definition, self.state) as self._preparation,
                BackgroundPredictions(executor.server) as self._predictions,
            ):
                self._finish_reached()
                for trial in self.state.trials.values():
                    if trial.is_over and trial.ranks is not None:  # it was stopped before the prediction
                        self._predict(trial)
                while not interrupt.is_requested and time.monotonic() < deadline:
                    if self._advance(executor):
                        return True
                    executor.wait(POLL_S)
        return False

    def _advance(self, executor: Executor) -> bool:
        """Conclude the trials that have ended and start the next. Return whether all are over."""
        ended = list(executor.collect())
        if self._is_metric_known and not any(status for _, status in ended):
            # An idle rank costs more than a late line in the journal, and nothing failed.
            self._start_prepared(executor, {running.number for running, _ in ended})
        for running, status in ended:
            self._conclude(running, status)
        self._exploit()
        self._stop_hopeless(executor)
        while (number := self._choose_next(executor, executor.running)) is not None:
            if not self._start(executor, number):
                break
        self._store(self._predictions.collect())
        if not executor.running:
            if choose_trial(self.definition.search, self.definition.objectives, self.state, ()) is not None:
                executor.check_loss()
            self._end_paused()
            self._check_refusals(max(1, len(self.state.trials)))
            self._store(self._predictions.finish())
            return True
        self._check_first_evaluation(executor)
        self._prepare_ahead()
        return False

    def _predict(self, trial: Trial) -> None:
        """Predict the whole training of a trial while it trains, unless that was done before its start."""
        if not trial.predicted and not trial.not_predicted:
            overrides = {"plan": trial.plan} if trial.plan is not None else {}
            spec, launch = self.definition.build_request(trial.values, overrides)
            self._predictions.add(trial.number, spec, launch, trial.ranks or 1)

    def _store(self, predictions: Iterator[tuple[int, TrialPrediction]]) -> None:
        for number, prediction in predictions:
            event = Predicted(trial=number, predicted=prediction.quantities, problem=prediction.problem)
            self._write(event)

    def _start_prepared(self, executor: Executor, ended: Collection[int]) -> None:
        """Start trials that were prepared while all ranks were busy."""
        while (number := self._choose_next(executor, executor.running.keys() | ended)) is not None:
            if not self._preparation.is_ready(number) or not self._start(executor, number):
                return

    def _prepare_ahead(self) -> None:
        """Prepare one of the next trials, if their values do not depend on results."""
        search = self.definition.search
        if search.sampler in NEEDS or search.scheduler not in ("none", "median"):
            return
        begin, end = self.state.next_number, count_all_trials(search, self.state)
        for number in range(begin, min(begin + AHEAD, end)):
            if number not in self.state.trials and not self._preparation.is_ready(number):
                values = SAMPLERS[search.sampler](self.definition, self.state, number)
                with contextlib.suppress(*NOT_STARTED):  # it is raised again when the trial starts
                    self._preparation.prepare(Trial(number, values))
                return

    def _exploit(self) -> None:
        """Let the worst trials of a complete generation take over checkpoints and values of the best."""
        search = self.definition.search
        if search.scheduler != "pbt" or not has_all_trials(search, self.state):
            return
        for exploit in list_exploits(self.definition, self.state):
            copy_checkpoint(self._folder.run(exploit.parent), self._folder.run(exploit.trial))
            generation = len(self.state.trials[exploit.trial].stages)
            event = Exploited(
                trial=exploit.trial, parent=exploit.parent, generation=generation, values=exploit.values
            )
            self._write(event)

    def _stop_hopeless(self, executor: Executor) -> None:
        """Stop trials that are worse than the median of the others at the same length."""
        if self.definition.search.scheduler != "median":
            return
        for running in list(executor.running.values()):
            trial, curve = self.state.trials[running.number], self._read_curve(running.number)
            if trial.is_over or not curve.update() or curve.is_at_end:
                continue
            others = [
                self._read_curve(number)
                for number, other in self.state.trials.items()
                if number != trial.number and other.state in ("complete", "pruned")
            ]
            for other in others:
                other.update()
            if is_hopeless(curve.points, [other.points for other in others]):
                samples, seconds = curve.points[-1][0], time.monotonic() - running.started
                self._write(
                    Reached(trial=trial.number, samples=samples, metrics=curve.metrics, seconds=seconds)
                )
                self._finish(trial, "pruned", f"worse than the median after {samples:,} samples")
                running.stop()

    def _read_curve(self, number: int) -> EvaluationCurve:
        if number not in self._curves:
            self._curves[number] = EvaluationCurve(self._folder.run(number), self.definition.objectives[0])
        return self._curves[number]

    def _end_paused(self) -> None:
        """Mark the trials that were not promoted as pruned."""
        for trial in self.state.trials.values():
            if not trial.is_over:
                samples = trial.stages[-1].samples
                self._finish(trial, "pruned", f"not promoted after {samples:,} samples")

    def _write(self, event: Any) -> None:
        self._journal.write(event)
        self.state.apply(event)

    def _choose_next(self, executor: Executor, running: Collection[int]) -> int | None:
        """Return the trial to start now, or None."""
        search = self.definition.search
        least = 1 if search.ranks_per_trial == "auto" else search.ranks_per_trial
        if not executor.has_room(least):
            return None
        return choose_trial(search, self.definition.objectives, self.state, running)

    def _start(self, executor: Executor, number: int) -> bool:
        """Start or refuse a trial. Return False if it has to wait for ranks."""
        search = self.definition.search
        if number not in self.state.trials:
            values = read_values(self.definition.space, self._folder.run(number))
            if values is None:
                values = SAMPLERS[search.sampler](self.definition, self.state, number)
            self._write(Suggested(trial=number, values=values))
        trial = self.state.trials[number]
        try:
            prepared = self._preparation.prepare(trial)
        except NOT_STARTED as error:
            self._preparation.forget(number)
            self._finish(trial, "refused", str(error))
            self._check_refusals()
            return True
        placement, run = prepared.placement, prepared.run
        if not executor.has_room(placement.ranks):
            return False
        self._preparation.forget(number)
        if is_trained(run, prepared.spec):  # the controller was killed before it wrote this down
            self._finish_trained(trial, run, max(0.0, measure_seconds(run) - trial.seconds))
            self._predict(trial)
            return True
        self._begin[number] = events.end(run.events)
        launched = Launched(
            trial=number, ranks=placement.ranks, plan=placement.plan, predicted=dict(placement.predicted)
        )
        self._write(launched)
        executor.start(number, run.path, self._folder.log(number), placement.ranks)
        self._predict(trial)
        return True

    def _check_refusals(self, least: int = REFUSED_IN_A_ROW) -> None:
        """Raise RunError if the last trials, at least that many, were all refused."""
        last = list(self.state.trials.values())[-least:]
        if len(last) < least or any(trial.state != "refused" for trial in last):
            return
        nearest = describe_nearest(self.definition.bounds, self._preparation.refused)
        raise RunError(
            f"no trial can start: {several(len(last), 'trial')} refused in a row, the last because "
            f"{last[-1].message}{nearest}"
        )

    def _conclude(self, running: RunningTrial, status: int) -> None:
        trial, run = self.state.trials[running.number], self._folder.run(running.number)
        if trial.is_over or running.is_lost:  # it was stopped, or continues on another node
            return
        if status == 0 and is_trained(run, run.request()[0]):
            self._finish_trained(trial, run, running.seconds)
            return
        begin = self._begin[trial.number]
        if status == STOPPED and any(isinstance(event, Saved) for event in events.read(run.events, begin)):
            return  # it saved and stopped, such as at its own max_time; it is continued
        message = describe_failure(run, begin, running.read_output(), running.log, status)
        self._finish(trial, "failed", message)
        self._check_failures(trial)

    def _finish_trained(self, trial: Trial, run: RunFolder, seconds: float) -> None:
        samples, metrics = read_metrics(run)
        metrics["time"] = trial.seconds + seconds
        metrics |= measure_cost(run, trial.rank_seconds + seconds * (trial.ranks or 1), self._price)
        if not self._is_metric_known:
            self._check_metrics(metrics)
        self._write(Reached(trial=trial.number, samples=samples, metrics=metrics, seconds=seconds))
        self._finish_stages(trial)

    def _finish_stages(self, trial: Trial) -> None:
        """Finish a trial if its last stage was the last of all, or has no result."""
        missing = [goal.name for goal in self.definition.objectives if trial.metrics.get(goal.name) is None]
        if missing:
            what = "is not a finite number" if missing[0] in trial.metrics else "is not among its metrics"
            self._finish(trial, "failed", f"{missing[0]} {what}")
        elif is_at_end(self.definition.search, trial):
            self._finish(trial, "complete", "")

    def _finish_reached(self) -> None:
        """Finish the trials that have reached their end, if the controller was killed between both lines."""
        search = self.definition.search
        for trial in self.state.trials.values():
            if trial.state != "paused" or not is_at_end(search, trial):
                continue
            run = self._folder.run(trial.number)
            if search.scheduler == "median" and not (run.spec.exists() and is_trained(run, run.request()[0])):
                self._finish(trial, "pruned", f"stopped after {trial.stages[-1].samples:,} samples")
            else:
                self._finish_stages(trial)

    def _finish(self, trial: Trial, state: Any, message: str) -> None:
        self._write(Finished(trial=trial.number, state=state, message=message))
        self._report(self.state, trial)

    def _check_first_evaluation(self, executor: Executor) -> None:
        """Raise SpecError after the first evaluation of the study if it lacks a metric of the study."""
        if self._is_metric_known or time.monotonic() < self._checked + CHECK_S:
            return
        self._checked = time.monotonic()
        for number in executor.running:
            for event in events.last(self._folder.run(number).events, Evaluated):
                assert isinstance(event, Evaluated)
                self._check_metrics({**event.metrics, **dict.fromkeys(MEASURED, 0.0)})

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        for goal in self.definition.objectives:
            if goal.name not in metrics and not goal.name.startswith(PREFIX):
                if goal.name in WHY_MISSING:
                    raise SpecError(f"--metric {str(goal)!r}: {WHY_MISSING[goal.name]}")
                names = [name for name in metrics if name not in MEASURED]
                hint = suggest(goal.name, names) if names else "; the task has no validation split"
                raise SpecError(f"--metric {str(goal)!r}: the evaluations have no {goal.name}{hint}")
        self._is_metric_known = True

    def _check_failures(self, trial: Trial) -> None:
        """Raise RunError if the last trials that are over all failed with the same sentence."""
        over = [other for other in self.state.trials.values() if other.is_over][-IDENTICAL_FAILURES:]
        sentences = {_normalize(other.message) if other.state == "failed" else None for other in over}
        if len(over) == IDENTICAL_FAILURES and len(sentences) == 1 and None not in sentences:
            raise RunError(
                f"{IDENTICAL_FAILURES} trials in a row failed with the same error, so the study stops: "
                f"{trial.message.splitlines()[0]}"
            )


def _normalize(message: str) -> str:
    """Return the sentence of a failure without what differs between trials: numbers and paths."""
    return re.sub(r"[\d.]+|\S*/\S*", "#", message.splitlines()[0] if message else "")


def _lock(folder: StudyFolder) -> Any:
    """Lock a study. Raises RunError if another controller runs it."""
    run = RunFolder(folder.path)
    try:
        return run.lock(LOCK_S)
    except RunError:
        raise RunError(
            f"{folder.path} is already being run by {run.holder()}; wait for it or end it"
        ) from None

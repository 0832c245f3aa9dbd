"""Everything that a trial needs before it can start: its placement, its request and its run folder."""

import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.errors import PlanError, SpecError
from paceline.run import RunFolder, collect_provenance, create
from paceline.spec import Launch, Spec, read_toml
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.prediction.placement import Placement, RefusedTrial
from paceline.tuning.schedulers.rungs import find_rung, list_shares
from paceline.tuning.space import Space

# Why a trial is refused. SpecError: its values contradict each other.
NOT_STARTED = (RefusedTrial, SpecError, PlanError)


@dataclass(frozen=True)
class PreparedTrial:
    """A trial whose run folder has the request of its next stage."""

    placement: Placement
    spec: Spec
    run: RunFolder


class Preparation:
    """Prepares trials, each once, so that the next trial can be prepared while all ranks are busy.

    A context manager, which finally deletes the folders of trials that are not in the journal.
    refused: predictions of trials that violated a condition.
    """

    def __init__(self, folder: StudyFolder, definition: StudyDefinition, state: StudyState):
        self._folder, self._definition, self._state = folder, definition, state
        self._provenance = collect_provenance()  # once: it asks git, which takes long in a large repository
        self.refused: list[Mapping[str, float]] = []
        self._ready: dict[int, PreparedTrial | Exception] = {}  # trials that wait for free ranks, by number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for number, ready in self._ready.items():
            if number not in self._state.trials and isinstance(ready, PreparedTrial):
                shutil.rmtree(ready.run.path)

    def is_ready(self, number: int) -> bool:
        """Return whether a trial is prepared, or cannot start."""
        return number in self._ready

    def prepare(self, trial: Trial) -> PreparedTrial:
        """Return the next stage of a trial.

        Raises RefusedTrial, SpecError or PlanError if it cannot start, and RunError if ranks of an earlier
        controller still train it.
        """
        if trial.number not in self._ready:
            self._ready[trial.number] = self._try(trial)
        ready = self._ready[trial.number]
        if isinstance(ready, Exception):
            raise ready
        return ready

    def _try(self, trial: Trial) -> PreparedTrial | Exception:
        try:
            placement = self._place(trial)
            spec, launch = self._build_request(trial, placement)
        except NOT_STARTED as error:
            return error
        run = _prepare_run(self._folder.run(trial.number), spec, launch, self._provenance)
        return PreparedTrial(placement, spec, run)

    def forget(self, number: int) -> None:
        """Prepare the next stage of a trial anew: it has started, or it is over."""
        self._ready.pop(number, None)

    def _place(self, trial: Trial) -> Placement:
        """Return the ranks and the plan of a trial. Raises RefusedTrial."""
        search = self._definition.search
        if trial.ranks is not None and search.count_nodes(trial.ranks):  # it continues as it started
            return Placement(trial.ranks, trial.plan, trial.predicted)
        if not self._definition.needs_prediction:
            assert isinstance(search.ranks_per_trial, int)
            return Placement(search.ranks_per_trial, None)
        from paceline.tuning.prediction.predict import check_bounds, choose_ranks, predict_trial

        spec, launch = self._definition.build_request(trial.values)
        if search.ranks_per_trial == "auto":
            placement = choose_ranks(spec, launch, search.ranks_per_node)
        else:
            placement = predict_trial(spec, launch, search.ranks_per_trial)
        try:
            check_bounds(self._definition.bounds, placement)
        except RefusedTrial:
            self.refused.append(placement.predicted)
            raise
        return placement

    def _build_request(self, trial: Trial, placement: Placement) -> tuple[Spec, Launch]:
        """Return the request of the next stage of a trial.

        There is no report and there are no samples of the machine unless they are requested.
        """
        request, shares = self._definition.request, list_shares(self._definition.search)
        threads = self._definition.search.threads
        defaults: dict[str, Any] = {"threads": threads, "report": False}
        if all(goal.name != "energy" for goal in self._definition.objectives):
            defaults["monitor"] = "off"
        given = request.keys() | {parameter.key for parameter in self._definition.space.parameters}
        overrides = {key: value for key, value in defaults.items() if key not in given and value is not None}
        overrides |= {"ranks": placement.ranks, "launcher": "local"}
        if (nodes := self._definition.search.count_nodes(placement.ranks) or 1) > 1:
            overrides |= {"nodes": nodes, "launcher": "slurm"}
        if placement.plan is not None:
            overrides["plan"] = placement.plan
        if len(shares) > 1:
            share = shares[find_rung(self._definition.search, trial)]
            overrides |= self._definition.limit_length(trial.values, share)
        return self._definition.build_request(trial.values, overrides)


def read_values(space: Space, run: RunFolder) -> dict[str, Any] | None:
    """Return the values of a trial from the request of its run; None if there is no run of this space.

    A trial has a run but is not in the journal if lines of the journal were lost.
    """
    try:
        request = read_toml(run.spec)
    except SpecError:
        return None
    values: dict[str, Any] = {}
    for parameter in space.parameters:
        if parameter.condition is None or parameter.condition.holds(values):
            values[parameter.name] = functools.reduce(_get, parameter.key.split("."), request)
    return values if space.contains(values) else None


def _get(table: Any, name: str) -> Any:
    return table.get(name) if isinstance(table, dict) else None


def _prepare_run(run: RunFolder, spec: Spec, launch: Launch, provenance: Mapping[str, Any]) -> RunFolder:
    """Return the run folder of a trial with this request. An existing run keeps its checkpoints.

    Raises RunError if ranks of an earlier controller still train it after 20 s.
    """
    if run.path.exists():
        try:
            earlier = run.request()
        except (SpecError, OSError):  # its controller was killed while it created the folder
            shutil.rmtree(run.path)
        else:
            run.lock().close()
            if earlier != (spec, launch):
                run.write_request(spec, launch)
            return run
    return create(run.path, spec, launch, provenance)

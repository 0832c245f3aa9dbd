"""Samplers of Optuna, in memory, rebuilt from the journal for each trial and seeded by its number.

No database and no pickled state: the values of a trial are a function of the search and the journal before
it, so that a study that was interrupted continues as if it had not been.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import Finished, StudyState, Suggested, Trial
from paceline.tuning.objectives import read_losses
from paceline.tuning.optuna_needs import REPLAYED
from paceline.tuning.parameter import Parameter

if TYPE_CHECKING:
    import optuna

MIN_POPULATION, MAX_POPULATION, GENERATIONS = 4, 50, 10


def suggest_with_optuna(definition: StudyDefinition, state: StudyState, number: int) -> dict[str, Any]:
    """Return the values that the sampler of the study chooses for a trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # options that Optuna calls experimental
        name = definition.search.sampler
        sampler = _build_sampler(name, _seed(definition.search.seed, number), definition)
        directions = ["minimize"] * len(definition.objectives)
        study = optuna.create_study(sampler=sampler, directions=directions)
        if name in REPLAYED:
            _replay(study, definition, state)
            # The replay drew an unknown number of random numbers. The state of the sampler is in the trials.
            study.sampler = _build_sampler(name, _seed(definition.search.seed, number), definition)
        else:
            _add_trials(study, definition, state)
        return _ask(study, definition)[1]


def _seed(search_seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{search_seed}/{number}".encode()).digest()[:4], "big")


def _build_sampler(name: str, seed: int, definition: StudyDefinition) -> "optuna.samplers.BaseSampler":
    from optuna import samplers

    trials = definition.search.trials
    population = min(MAX_POPULATION, max(MIN_POPULATION, trials // GENERATIONS))
    build: Mapping[str, Callable[[], samplers.BaseSampler]] = {
        "tpe": lambda: samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=definition.search.ranks > 1
        ),
        "gp": lambda: samplers.GPSampler(seed=seed),
        "cma-es": lambda: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        "nsga2": lambda: samplers.NSGAIISampler(seed=seed, population_size=population),
    }
    return build[name]()


def distribution(parameter: Parameter) -> "optuna.distributions.BaseDistribution":
    """Return Optuna's description of a parameter."""
    from optuna import distributions

    if parameter.kind == "choice":
        return distributions.CategoricalDistribution(parameter.choices)
    if parameter.kind == "int":
        step = 1 if parameter.is_log or parameter.step is None else round(parameter.step)
        return distributions.IntDistribution(
            round(parameter.low), round(parameter.high), parameter.is_log, step
        )
    return distributions.FloatDistribution(parameter.low, parameter.high, parameter.is_log, parameter.step)


def _ask(
    study: "optuna.Study", definition: StudyDefinition, fixed: Mapping[str, Any] | None = None
) -> tuple["optuna.Trial", dict[str, Any]]:
    """Return the next trial of a study and its values, which are `fixed` if that is given."""
    if fixed is not None:
        study.enqueue_trial(dict(fixed))
    asked = study.ask()
    values: dict[str, Any] = {}
    for parameter in definition.space.parameters:
        if parameter.condition is None or parameter.condition.holds(values):
            values[parameter.name] = _suggest(asked, parameter)
    return asked, values


def _suggest(asked: "optuna.Trial", parameter: Parameter) -> Any:
    from optuna import distributions

    name, kind = parameter.name, distribution(parameter)
    if isinstance(kind, distributions.CategoricalDistribution):
        return asked.suggest_categorical(name, kind.choices)
    if isinstance(kind, distributions.IntDistribution):
        return asked.suggest_int(name, kind.low, kind.high, step=kind.step, log=kind.log)
    assert isinstance(kind, distributions.FloatDistribution)
    return asked.suggest_float(name, kind.low, kind.high, step=kind.step, log=kind.log)


def _add_trials(study: "optuna.Study", definition: StudyDefinition, state: StudyState) -> None:
    """Add all trials so far, with what is known of them."""
    for trial in state.trials.values():
        study.add_trial(to_optuna(definition, trial))


def to_optuna(definition: StudyDefinition, trial: Trial) -> "optuna.trial.FrozenTrial":
    """Return a trial as Optuna describes it. All objectives are losses: smaller is better."""
    from optuna.trial import TrialState, create_trial

    parameters = [entry for entry in definition.space.parameters if entry.name in trial.values]
    losses = read_losses(definition.objectives, trial)
    is_single = len(definition.objectives) == 1
    stages = {
        stage.samples: loss
        for stage in trial.stages
        if is_single and (loss := definition.objectives[0].read_loss(stage.metrics)) is not None
    }
    if losses is not None and trial.state == "complete":
        state = TrialState.COMPLETE
    elif trial.state in ("failed", "refused", "complete"):
        state = TrialState.FAIL
    elif trial.state in ("pruned", "paused") and stages:
        state = TrialState.PRUNED
    else:
        state = TrialState.RUNNING
    return create_trial(
        state=state,
        params={entry.name: trial.values[entry.name] for entry in parameters},
        distributions={entry.name: distribution(entry) for entry in parameters},
        values=list(losses) if losses is not None and state == TrialState.COMPLETE else None,
        intermediate_values=stages,
    )


def _replay(study: "optuna.Study", definition: StudyDefinition, state: StudyState) -> None:
    """Ask and tell as the journal did, with the values that it has.

    CMA-ES and NSGA-II keep generations in the trials that they were asked for.
    """
    from optuna.trial import TrialState

    asked: dict[int, optuna.Trial] = {}
    for event in state.events:
        if isinstance(event, Suggested):
            asked[event.trial], _ = _ask(study, definition, event.values)
        elif isinstance(event, Finished):
            trial = state.trials[event.trial]
            losses = read_losses(definition.objectives, trial)
            if event.state in ("complete", "pruned") and losses is not None:
                study.tell(asked[event.trial], list(losses))
            else:
                study.tell(asked[event.trial], state=TrialState.FAIL)

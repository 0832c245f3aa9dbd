"""A study as a study of Optuna: importance of parameters, and a journal file that optuna-dashboard opens."""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RunError, SpecError
from paceline.files import check_target, reason
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import StudyState
from paceline.tuning.objectives import read_losses
from paceline.tuning.report.results import check_values
from paceline.tuning.samplers.optuna_samplers import to_optuna

if TYPE_CHECKING:
    import optuna

MIN_TRIALS = 4  # complete ones, for an importance
TREES_SEED = 0


def compute_importance(definition: StudyDefinition, state: StudyState) -> dict[str, float]:
    """Return the share of the variance of the first objective that each parameter explains, largest first.

    It is empty if Optuna or scikit-learn are not installed, and for fewer than four complete trials.
    Hutter et al., An Efficient Approach for Assessing Hyperparameter Importance, 2014 (fANOVA).
    """
    complete = [
        trial
        for trial in state.trials.values()
        if trial.state == "complete" and definition.space.contains(trial.values)
    ]
    first = definition.objectives[:1]
    losses = {losses for trial in complete if (losses := read_losses(first, trial)) is not None}
    has_packages = all(importlib.util.find_spec(name) is not None for name in ("optuna", "sklearn"))
    if not has_packages or len(complete) < MIN_TRIALS or len(losses) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(directions=["minimize"] * len(definition.objectives))
        for trial in complete:
            study.add_trial(to_optuna(definition, trial))
        return optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=TREES_SEED),
            target=lambda trial: trial.values[0],
        )


def export_study(definition: StudyDefinition, state: StudyState, path: Path, name: str) -> None:
    """Write a journal file of Optuna with all trials. Raises SpecError, and RunError if the file exists."""
    if importlib.util.find_spec("optuna") is None:
        raise SpecError('--optuna requires Optuna, which is not installed; pip install "paceline[tune]"')
    check_target(path)
    if os.path.lexists(path):
        raise RunError(f"{path} exists already, and Optuna would append to it; specify another file")
    check_values(definition.space, state, "study.toml")
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["maximize" if goal.direction == "max" else "minimize" for goal in definition.objectives]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))), study_name=name, directions=directions
            )
            study.set_metric_names([goal.name for goal in definition.objectives])
            for trial in state.trials.values():
                study.add_trial(_with_own_signs(definition, to_optuna(definition, trial)))
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}") from error


def _with_own_signs(
    definition: StudyDefinition, trial: "optuna.trial.FrozenTrial"
) -> "optuna.trial.FrozenTrial":
    """Return a trial with its objectives in place of losses."""
    goals = definition.objectives
    values = trial.values
    if values is not None:
        trial.values = [goal.as_loss(value) for goal, value in zip(goals, values, strict=True)]
    trial.intermediate_values = {
        step: goals[0].as_loss(value) for step, value in trial.intermediate_values.items()
    }
    return trial

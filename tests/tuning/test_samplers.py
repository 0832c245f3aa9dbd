"""Samplers find good values, and suggest the same values again from the same journal."""

import math
import statistics

import pytest

from paceline.errors import SpecError
from paceline.tuning.definition import Search, StudyDefinition
from paceline.tuning.journal import Finished, Launched, Reached, StudyState, Suggested
from paceline.tuning.optuna_needs import NEEDS, check_sampler
from paceline.tuning.parameter import parse_parameter
from paceline.tuning.samplers.table import SAMPLERS
from paceline.tuning.space import build_space

RANGES = {"x": "float:-5:5", "rate": "log:1e-4:1", "depth": "int:1:9", "kind": "a,b,c if depth>3"}


def define(sampler: str, metrics: tuple[str, ...] = ("min loss",), **options) -> StudyDefinition:
    space = build_space([parse_parameter(name, f"set.{name}", None, text) for name, text in RANGES.items()])
    search = Search(sampler=sampler, metrics=metrics, **options)
    return StudyDefinition({"task": "digits"}, RANGES, search, space)


def loss_of(values: dict) -> float:
    """Return a loss whose least value, 0, is at x=2, rate=0.01, depth=7, kind=b."""
    penalty = 0.0 if values.get("kind") == "b" else 1.0
    return (
        (values["x"] - 2) ** 2 + math.log10(values["rate"] / 0.01) ** 2 + (values["depth"] - 7) ** 2 + penalty
    )


def run(definition: StudyDefinition, trials: int) -> StudyState:
    state = StudyState()
    for number in range(trials):
        values = SAMPLERS[definition.search.sampler](definition, state, number)
        apply_result(state, number, values)
    return state


def apply_result(state: StudyState, number: int, values: dict) -> None:
    state.apply(Suggested(trial=number, values=values))
    state.apply(Launched(trial=number, ranks=1))
    if number % 7 == 3:
        state.apply(Finished(trial=number, state="failed", message="it broke"))
        return
    metrics = {"loss": loss_of(values), "size": float(values["depth"])}
    state.apply(Reached(trial=number, samples=8, metrics=metrics, seconds=1.0))
    state.apply(Finished(trial=number, state="complete"))


def best(state: StudyState) -> float:
    return min(trial.metrics["loss"] for trial in state.trials.values() if trial.metrics)


@pytest.mark.parametrize("sampler", ["random", "quasi-random", *NEEDS])
def test_values_follow_from_the_journal(sampler):
    """A sampler with a state besides the journal would fail: each is asked again from the events."""
    if sampler in NEEDS:
        pytest.importorskip("optuna")
    definition = define(sampler, trials=16)
    state = run(definition, 16)
    shown = [tuple(trial.values.items()) for trial in state.trials.values()]
    assert len({*shown}) == len(shown), "each trial is another point"
    for number in (0, 1, 15):
        again = StudyState()
        for event in state.events:
            if event.trial < number:
                again.apply(event)
        values = SAMPLERS[sampler](definition, again, number)
        assert values == state.trials[number].values
        assert list(values) == [name for name in RANGES if name in values]
        assert ("kind" in values) == (values["depth"] > 3)
    other = define(sampler, trials=16, seed=1)
    assert SAMPLERS[sampler](other, StudyState(), 0) != state.trials[0].values


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "gp", "cma-es"])
def test_samplers_of_optuna_learn(sampler):
    pytest.importorskip("optuna")
    learned = [best(run(define(sampler, trials=40, seed=seed), 40)) for seed in range(5)]
    drawn = [best(run(define("random", trials=40, seed=seed), 40)) for seed in range(5)]
    assert statistics.median(learned) < 0.7 * statistics.median(drawn)


def test_two_objectives_with_a_running_trial():
    pytest.importorskip("optuna")
    definition = define("tpe", ("min loss", "max size"), trials=30, ranks=2)
    state = run(definition, 14)
    state.apply(Suggested(trial=14, values=state.trials[0].values))
    assert SAMPLERS["tpe"](definition, state, 15).keys() >= {"x", "rate", "depth"}


def test_cma_es_refuses_several_objectives():
    pytest.importorskip("cmaes")
    with pytest.raises(SpecError, match="cma-es searches one objective, got 2; use tpe or nsga2"):
        check_sampler("cma-es", 2)


def test_missing_optuna_is_one_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r'pip install "paceline\[tune\]"'):
        check_sampler("tpe", 1)

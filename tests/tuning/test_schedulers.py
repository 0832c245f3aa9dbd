"""Schedulers: which trials are trained how long, simulated with known losses."""

import math
from collections import Counter

import pytest

from paceline.tuning.definition import Search
from paceline.tuning.journal import Finished, Launched, Reached, StudyState, Suggested
from paceline.tuning.objectives import StudyObjective
from paceline.tuning.schedulers.rungs import choose_trial, find_first_rung, find_rung, list_shares

LOSS = [StudyObjective("min", "loss")]


def simulate(search: Search, losses: list[float], workers: int = 1) -> tuple[StudyState, Counter]:
    """Return the state of a study, and how often each stage was trained.

    The loss of trial n is losses[n] at each rung. `workers` trials run at a time and end in the order of
    their starts.
    """
    state, trained, running = StudyState(), Counter(), []
    while True:
        number = choose_trial(search, LOSS, state, running) if len(running) < workers else None
        if number is not None:
            if number not in state.trials:
                state.apply(Suggested(trial=number, values={}))
            trained[number, find_rung(search, state.trials[number])] += 1
            state.apply(Launched(trial=number, ranks=1))
            running.append(number)
            continue
        if not running:
            return state, trained
        number = running.pop(0)
        loss = losses[number] if math.isfinite(losses[number]) else None
        state.apply(Reached(trial=number, samples=1, metrics={"loss": loss}, seconds=1.0))
        if loss is None:
            state.apply(Finished(trial=number, state="failed"))
        elif find_rung(search, state.trials[number]) == len(list_shares(search)):
            state.apply(Finished(trial=number, state="complete"))


@pytest.mark.parametrize("workers", [1, 4])
def test_asha_trains_the_best_to_the_end_and_each_stage_once(workers):
    search = Search(scheduler="asha", trials=27, reduction=3, rungs=3)
    losses = [((7 * number) % 27) / 27 for number in range(27)]
    state, trained = simulate(search, losses, workers)
    assert set(trained.values()) == {1}
    counts = Counter(rung for _, rung in trained)
    assert counts[0] == 27
    assert 9 <= counts[1] <= 15, "asynchronous promotions promote a few too many"
    assert 3 <= counts[2] <= 6
    assert state.trials[losses.index(0.0)].state == "complete"
    assert sum(list_shares(search)[rung] for _, rung in trained) < 27 / 2


def test_asha_prefers_promotions_to_new_trials():
    search = Search(scheduler="asha", trials=9, reduction=3, rungs=2)
    state, _ = simulate(search, [0.3, 0.1, 0.2] + [0.9] * 6)
    order = [event.trial for event in state.events if isinstance(event, Launched)]
    assert order[:4] == [0, 1, 2, 1]


def test_asha_never_promotes_a_failed_trial():
    search = Search(scheduler="asha", trials=6, reduction=3, rungs=2)
    state, trained = simulate(search, [math.nan, 0.5, 0.4, math.nan, 0.3, 0.2])
    assert state.trials[0].state == "failed"
    assert not {(0, 1), (3, 1)} & {*trained}
    assert trained[5, 1] == 1


def test_hyperband_has_brackets_of_equal_cost():
    search = Search(scheduler="hyperband", trials=170, reduction=3, rungs=3)
    shares = list_shares(search)
    assert shares == pytest.approx([1 / 9, 1 / 3, 1])
    brackets = Counter(find_first_rung(search, number) for number in range(17 * 10))
    assert brackets == {0: 90, 1: 50, 2: 30}
    _, trained = simulate(search, [number % 100 / 100 for number in range(170)])
    first = Counter(find_first_rung(search, number) for number, rung in trained)
    assert {*first} == {0, 1, 2}
    assert all(find_first_rung(search, number) <= rung for number, rung in trained)


def test_without_a_scheduler_all_trials_have_one_stage():
    search = Search(trials=5)
    _, trained = simulate(search, [0.0] * 5, workers=2)
    assert trained == {(number, 0): 1 for number in range(5)}

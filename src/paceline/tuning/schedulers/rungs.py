"""Schedulers: how long each trial trains, and which trial trains next, as functions of the journal.

A trial of several stages pauses after each: its training ends with a checkpoint, and a promotion resumes it
with a greater length. So a pause costs no rank, and the training is that of one that did not pause.

Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020 (ASHA);
Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, 2018.
"""

import functools
import math
from collections.abc import Collection, Sequence

from paceline.tuning.definition import Search
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.objectives import StudyObjective


def list_shares(search: Search) -> list[float]:
    """Return the share of the whole length at which each stage ends, in rising order."""
    if search.scheduler in ("asha", "hyperband"):
        return [search.reduction**-power for power in range(search.rungs - 1, 0, -1)] + [1.0]
    if search.scheduler == "pbt":
        return [generation / search.rungs for generation in range(1, search.rungs + 1)]
    return [1.0]


def find_first_rung(search: Search, number: int) -> int:
    """Return the rung at whose end the first stage of a trial ends: its bracket of Hyperband.

    Brackets take turns. In each, about as much is trained: one that begins at a higher rung has fewer trials.
    """
    if search.scheduler != "hyperband":
        return 0
    turns = _list_turns(search.rungs, search.reduction)
    return turns[number % len(turns)]


@functools.cache
def _list_turns(rungs: int, reduction: int) -> list[int]:
    """Return the bracket of each of the trials after which the brackets repeat."""
    counts = [math.ceil(rungs / (rungs - first) * reduction ** (rungs - 1 - first)) for first in range(rungs)]
    return [first for first, count in enumerate(counts) for _ in range(count)]


def find_rung(search: Search, trial: Trial) -> int:
    """Return the rung that the next stage of a trial reaches."""
    return find_first_rung(search, trial.number) + len(trial.stages)


def is_at_end(search: Search, trial: Trial) -> bool:
    """Return whether a trial has reached the last rung."""
    return find_rung(search, trial) >= len(list_shares(search))


def choose_trial(
    search: Search, objectives: Sequence[StudyObjective], state: StudyState, running: Collection[int]
) -> int | None:
    """Return the trial to train now: an interrupted, a promoted, or a new one; None to wait or end."""
    for number, trial in state.trials.items():
        if number not in running and trial.state in ("waiting", "running"):
            return number
    promoted = find_promotion(search, objectives, state)
    if promoted is not None:
        return promoted
    if search.scheduler == "pbt" and (member := find_member(search, state)) is not None:
        return member
    return None if has_all_trials(search, state) else state.next_number


def has_all_trials(search: Search, state: StudyState) -> bool:
    """Return whether no new trial follows."""
    return len(state.trials) >= count_all_trials(search, state)


def count_all_trials(search: Search, state: StudyState) -> int:
    """Return the number of all trials. Refused trials do not count as trials, except in a grid."""
    refused = sum(trial.state == "refused" for trial in state.trials.values())
    return search.trials + (0 if search.sampler == "grid" else refused)


def find_member(search: Search, state: StudyState) -> int | None:
    """Return the next trial of a population that lags behind the others, or None to wait for them."""
    if not has_all_trials(search, state):
        return None
    active = [trial for trial in state.trials.values() if not trial.is_over]
    generation = min((len(trial.stages) for trial in active), default=0)
    return next(
        (trial.number for trial in active if trial.state == "paused" and len(trial.stages) == generation),
        None,
    )


def find_promotion(search: Search, objectives: Sequence[StudyObjective], state: StudyState) -> int | None:
    """Return a paused trial that is among the best of its rung, from the highest rung down, or None.

    Of n trials of a bracket that have reached a rung, the best n / reduction are promoted.
    """
    if search.scheduler not in ("asha", "hyperband"):
        return None
    for rung in range(search.rungs - 2, -1, -1):
        for bracket in range(search.rungs):
            ranked = sorted(
                (loss, trial.number)
                for trial in state.trials.values()
                if find_first_rung(search, trial.number) == bracket
                and (loss := _loss_at(search, objectives[0], trial, rung)) is not None
            )
            for _, number in ranked[: len(ranked) // search.reduction]:
                trial = state.trials[number]
                if trial.state == "paused" and find_rung(search, trial) == rung + 1:
                    return number
    return None


def _loss_at(search: Search, objective: StudyObjective, trial: Trial, rung: int) -> float | None:
    """Return the loss with which a trial reached a rung; infinite if it failed there or is not finite."""
    at = rung - find_first_rung(search, trial.number)
    if not 0 <= at < len(trial.stages):
        return None
    loss = objective.read_loss(trial.stages[at].metrics)
    return loss if loss is not None else math.inf

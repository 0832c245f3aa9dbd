"""Samplers: the values of the next trial as a function of the study and its journal."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import StudyState
from paceline.tuning.optuna_needs import NEEDS

# Returns the values of the trial with a number, given the state of the study before it.
Sampler = Callable[[StudyDefinition, StudyState, int], dict[str, Any]]


def draw_random(definition: StudyDefinition, state: StudyState, number: int) -> dict[str, Any]:
    """Return independent random values."""
    return definition.space.decode(
        {name: _random(definition, number, name).random() for name in _names(definition)}
    )


def take_from_grid(definition: StudyDefinition, state: StudyState, number: int) -> dict[str, Any]:
    """Return combination `number` of the grid."""
    return next(itertools.islice(definition.space.list_grid(), number, None))


def draw_quasi_random(definition: StudyDefinition, state: StudyState, number: int) -> dict[str, Any]:
    """Return a point of a Halton sequence with random permutations of its digits (Owen, 2017)."""
    names = _names(definition)
    shares = {}
    for name, base in zip(names, _first_primes(len(names)), strict=True):
        shares[name] = scrambled_radical_inverse(number, base, f"{definition.search.seed}/{name}")
    return definition.space.decode(shares)


def ask_optuna(definition: StudyDefinition, state: StudyState, number: int) -> dict[str, Any]:
    """Return the values that a sampler of Optuna chooses."""
    from paceline.tuning.samplers.optuna_samplers import suggest_with_optuna

    return suggest_with_optuna(definition, state, number)


SAMPLERS: dict[str, Sampler] = {
    "random": draw_random,
    "grid": take_from_grid,
    "quasi-random": draw_quasi_random,
    **dict.fromkeys(NEEDS, ask_optuna),
}


def _names(definition: StudyDefinition) -> list[str]:
    return [parameter.name for parameter in definition.space.parameters]


def _random(definition: StudyDefinition, number: int, name: str) -> random.Random:
    """Return random numbers of one parameter of one trial. They do not depend on other parameters."""
    return random.Random(f"{definition.search.seed}/{number}/{name}")


def scrambled_radical_inverse(index: int, base: int, key: str) -> float:
    """Return the digits of `index` in `base`, permuted at each position and mirrored at the point.

    The first base^k indices have one point in each of base^k equal intervals.
    """
    value, scale, position = 0.0, 1.0, 0
    while scale > 1e-12:
        index, digit = divmod(index, base)
        scale /= base
        value += scale * _permutation(base, f"{key}/{position}")[digit]
        position += 1
    return min(value, 1.0 - 2**-53)


def _permutation(base: int, key: str) -> Sequence[int]:
    digits = list(range(base))
    random.Random(key).shuffle(digits)
    return digits


def _first_primes(count: int) -> list[int]:
    primes: list[int] = []
    candidate = 2
    while len(primes) < count:
        if all(candidate % prime for prime in primes):
            primes.append(candidate)
        candidate += 1
    return primes

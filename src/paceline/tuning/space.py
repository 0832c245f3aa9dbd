"""The search space: its parameters, and the values of a trial."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import SpecError
from paceline.spec import suggest
from paceline.tuning.parameter import Parameter, ParameterCondition

MAX_GRID = 1_000_000  # trials of a grid


@dataclass(frozen=True)
class Space:
    """Parameters in an order in which each condition refers to an earlier parameter."""

    parameters: tuple[Parameter, ...]

    def decode(self, shares: Mapping[str, float]) -> dict[str, Any]:
        """Return the values of a trial from positions of 0 to 1, without parameters that do not apply."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.condition is None or parameter.condition.holds(values):
                values[parameter.name] = parameter.from_unit(shares[parameter.name])
        return values

    def contains(self, values: Mapping[str, Any]) -> bool:
        """Return whether these are values of a trial."""
        known = {parameter.name: parameter for parameter in self.parameters}
        return all(name in known and known[name].contains(value) for name, value in values.items())

    def list_grid(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations; the last parameter varies fastest. Raises SpecError."""
        yield from self._extend({}, self.parameters)

    def _extend(self, values: dict[str, Any], rest: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
        if not rest:
            yield values
            return
        parameter, *others = rest
        if parameter.condition is not None and not parameter.condition.holds(values):
            yield from self._extend(values, others)
            return
        for value in parameter.iterate_values():
            yield from self._extend(values | {parameter.name: value}, others)

    def count_grid(self) -> int:
        """Return the number of combinations. Raises SpecError if there are too many."""
        if not any(parameter.condition for parameter in self.parameters):
            count = math.prod(parameter.count_values() for parameter in self.parameters)
        else:
            count = sum(1 for _ in itertools.islice(self.list_grid(), MAX_GRID + 1))
        if count > MAX_GRID:
            raise SpecError(f"the grid has more than {MAX_GRID:,} combinations; use larger steps")
        return count

    def find_condition_values(self, parameter: Parameter) -> dict[str, Any]:
        """Return values of other parameters with which a parameter applies."""
        if parameter.condition is None:
            return {}
        other = next(entry for entry in self.parameters if entry.name == parameter.condition.name)
        value = next(_find_holding(parameter.condition, other))
        return {**self.find_condition_values(other), other.name: value}

    def to_overrides(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides of a request, by key."""
        keys = {parameter.name: parameter.key for parameter in self.parameters}
        return {keys[name]: value for name, value in values.items()}


def build_space(parameters: Sequence[Parameter]) -> Space:
    """Return the space, with each parameter behind that of its condition. Raises SpecError."""
    names = [parameter.name for parameter in parameters]
    keys: dict[str, str] = {}
    for parameter in parameters:
        if (other := keys.setdefault(parameter.key, parameter.name)) != parameter.name:
            raise SpecError(f"--space {other} and {parameter.name} are the same key; leave one out")
    ordered: list[Parameter] = []
    waiting = list(parameters)
    while waiting:
        placed = {parameter.name for parameter in ordered}
        ready = [entry for entry in waiting if entry.condition is None or entry.condition.name in placed]
        if not ready:
            entry = waiting[0]
            assert entry.condition is not None
            if entry.condition.name in names:
                raise SpecError(f"--space {entry.name}: its condition {entry.condition} refers to itself")
            raise SpecError(
                f"--space {entry.name}: its condition {entry.condition} names no parameter of the space"
                f"{suggest(entry.condition.name, names)}"
            )
        ordered += ready
        waiting = [entry for entry in waiting if entry not in ready]
    for entry in ordered:
        if entry.condition is not None:
            parent = next(known for known in ordered if known.name == entry.condition.name)
            if next(_find_holding(entry.condition, parent), None) is None:
                raise SpecError(
                    f"--space {entry.name}: its condition {entry.condition} never holds, since "
                    f"{parent.name} is {parent.describe_range()}"
                )
    return Space(tuple(ordered))


def _find_holding(condition: ParameterCondition, other: Parameter) -> Iterator[Any]:
    """Yield values of the other parameter of a condition that satisfy it."""
    candidates = other.extremes()
    if other.contains(condition.value):
        candidates.append(condition.value)
    yield from (value for value in candidates if condition.holds({other.name: value}))

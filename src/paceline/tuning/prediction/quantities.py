"""What is predicted of a trial before it starts, and conditions on it."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec import suggest
from paceline.units import format_bytes, format_seconds, parse_bytes, parse_duration_s

# What is predicted, and its unit.
QUANTITIES = {
    "step_s": "seconds of a step",
    "memory": "bytes of the rank with peak memory",
    "parameters": "number of parameters",
    "time": "seconds of the training",
    "energy": "kWh of the training",
    "price": "price of the training",
}
PREFIX = "predicted."
OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
BOUND = re.compile(r"\s*(?:predicted\.)?(\w+)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Bound:
    """A condition on a predicted quantity, such as `memory<16GiB`."""

    name: str
    operator: str
    limit: float
    text: str

    def holds(self, predicted: Mapping[str, float]) -> bool:
        """Return whether the prediction satisfies the condition. An unknown quantity does not."""
        return self.name in predicted and bool(OPERATORS[self.operator](predicted[self.name], self.limit))


def parse_bound(text: str) -> Bound:
    """Return the condition of `--where`. Raises SpecError."""
    match = BOUND.fullmatch(text)
    if match is None:
        raise SpecError(f"--where must be NAME<VALUE, such as 'memory<16GiB', got {text!r:.60}")
    name, sign, value = match.groups()
    if name not in QUANTITIES:
        raise SpecError(f"--where {text}: nothing predicts {name}{suggest(name, QUANTITIES)}")
    try:
        limit = {"memory": parse_bytes, "time": parse_duration_s}.get(name, float)(value)
    except ValueError:
        try:
            limit = float(value)
        except ValueError:
            example = {"memory": "16GiB", "time": "2h"}.get(name, "0.5")
            raise SpecError(
                f"--where {text}: {value!r} is no value of {name}; write {name}{sign}{example}"
            ) from None
    return Bound(name, sign, float(limit), text)


def describe_nearest(bounds: Sequence[Bound], refused: Sequence[Mapping[str, float]]) -> str:
    """Return what would have to be allowed for one of the refused predictions, as the end of a sentence."""
    parts = []
    for bound in bounds:
        values = [predicted[bound.name] for predicted in refused if bound.name in predicted]
        if values and not any(bound.holds({bound.name: value}) for value in values):
            is_upper = bound.operator in ("<", "<=")
            nearest = format_quantity(bound.name, min(values) if is_upper else max(values))
            parts.append(f"the {'smallest' if is_upper else 'largest'} predicted {bound.name} was {nearest}")
    return f"; {' and '.join(parts)}" if parts else ""


def format_quantity(name: str, value: float) -> str:
    """Return a predicted quantity with its unit."""
    if name == "memory":
        return format_bytes(value)
    if name in ("time", "step_s"):
        return format_seconds(value)
    return f"{value:.4g}" + (" kWh" if name == "energy" else "")

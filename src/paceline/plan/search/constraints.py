"""Constraints on plans: `pp<=4,tp<=8,recompute!=full`."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import PlanError
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.plan import RECOMPUTE
from paceline.plan.schedules import SCHEDULES
from paceline.spec import suggest

COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
# Names in constraints, by attribute of a split.
NUMBERS = ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "micro_batch", "microbatches", "stages")
WORDS: Mapping[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "pp_schedule": tuple(SCHEDULES)}
PATTERN = re.compile(r"\s*(\w+)\s*(<=|>=|!=|<|>|=)\s*([\w.-]+)\s*")


class Constraint(NamedTuple):
    """A comparison of a property of a plan with a value."""

    name: str
    comparison: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.value}"

    def allows(self, split: WorkSplit) -> bool:
        found = getattr(split, "schedule" if self.name == "pp_schedule" else self.name)
        if self.name == "pp_schedule" and split.pp == 1:
            return True
        return bool(COMPARISONS[self.comparison](found, self.value))


def parse_constraints(text: str) -> tuple[Constraint, ...]:
    """Return the constraints that commas separate. Raises PlanError."""
    return tuple(_parse(part) for part in text.split(","))


def allows_all(constraints: Sequence[Constraint], split: WorkSplit) -> bool:
    return all(constraint.allows(split) for constraint in constraints)


def _parse(part: str) -> Constraint:
    matched = PATTERN.fullmatch(part)
    if matched is None:
        raise PlanError(
            f"--where must be comparisons such as 'pp<=4,recompute!=full', got {part.strip()!r:.60}"
        )
    name, comparison, value = matched.groups()
    names = (*NUMBERS, *WORDS)
    if name not in names:
        raise PlanError(f"--where {part.strip()}: plans have no {name}{suggest(name, names)}")
    if name in NUMBERS:
        if not value.isdecimal():
            raise PlanError(f"--where {part.strip()}: {name} is a number, got {value!r}")
        return Constraint(name, comparison, int(value))
    if value not in WORDS[name] or comparison not in ("=", "!="):
        raise PlanError(f"--where {part.strip()}: {name} is = or != one of {', '.join(WORDS[name])}")
    return Constraint(name, comparison, value)

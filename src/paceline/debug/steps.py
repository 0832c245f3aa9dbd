"""The first step in which two runs differ: loss, gradient norm and learning rate, from their events."""

import bisect
import math
from array import array
from dataclasses import dataclass, field

from paceline.events import EventReader, Skipped, Started, Step, readable
from paceline.run import RunFolder

QUANTITIES = ("lr", "loss", "grad_norm")


@dataclass(frozen=True)
class QuantityDifference:
    """A number of a step that differs by more than the tolerance.

    quantity  "lr", "loss" or "grad_norm"
    a, b      its values; None if an fp16 overflow left no gradient norm
    relative  |a - b| / max(|a|, |b|); inf if one of them is not a number
    """

    quantity: str
    a: float | None
    b: float | None
    relative: float


@dataclass(frozen=True)
class StepsComparison:
    """The steps of two runs, compared.

    count            number of compared steps: those that both runs have
    begin, end       the first and the last of them
    first_unequal    the first step in which a number differs at all; None if all are equal
    first_different  the first step in which a number differs by more than the tolerance; None if none does
    differences      the numbers of that step that differ by more than the tolerance
    max_relative     the largest relative difference of the steps before it, or of all steps
    """

    count: int
    begin: int
    end: int
    first_unequal: int | None
    first_different: int | None
    differences: tuple[QuantityDifference, ...]
    max_relative: float


@dataclass
class StepTable:
    """The steps of a run in ascending order. Of a repeated step, the last line counts."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "dict[str, array[float]]" = field(
        default_factory=lambda: {quantity: array("d") for quantity in QUANTITIES}
    )
    starts: list[Started] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)

    def add(self, event: Step) -> None:
        """Append a step. A step that is there already replaces itself and all later steps."""
        if self.steps and event.step <= self.steps[-1]:
            at = bisect.bisect_left(self.steps, event.step)
            del self.steps[at:]
            for column in self.values.values():
                del column[at:]
        self.steps.append(event.step)
        for quantity, column in self.values.items():
            value = getattr(event, quantity)
            column.append(math.nan if value is None else value)


def read_steps(run: RunFolder) -> StepTable:
    """Return the steps and the starts of a run. Raises RunError for an unreadable file."""
    table, reader = StepTable(), EventReader(run.events)
    with readable(run.events):
        for event in reader.new(Started, Step):
            if isinstance(event, Step):
                table.add(event)
            elif isinstance(event, Started):
                table.starts.append(event)
    table.skipped = reader.skipped
    return table


def compare_steps(a: StepTable, b: StepTable, tolerance: float) -> StepsComparison | None:
    """Compare the steps that both runs have, up to the first that differs; None if they share no step.

    tolerance: relative difference up to which numbers count as equal.
    """
    in_a, in_b = _common_positions(a.steps, b.steps)
    if not in_a:
        return None
    first_unequal: int | None = None
    largest = 0.0
    for i, j in zip(in_a, in_b, strict=True):
        step = a.steps[i]
        pairs = {quantity: (a.values[quantity][i], b.values[quantity][j]) for quantity in QUANTITIES}
        relatives = {quantity: relative_difference(*pair) for quantity, pair in pairs.items()}
        most = max(relatives.values())
        if most and first_unequal is None:
            first_unequal = step
        if most > tolerance:
            differences = tuple(
                QuantityDifference(
                    quantity, _none_if_nan(pairs[quantity][0]), _none_if_nan(pairs[quantity][1]), relative
                )
                for quantity, relative in relatives.items()
                if relative > tolerance
            )
            break
        largest = max(largest, most)
    else:
        step, differences = 0, ()
    return StepsComparison(
        count=len(in_a),
        begin=a.steps[in_a[0]],
        end=a.steps[in_a[-1]],
        first_unequal=first_unequal,
        first_different=step or None,
        differences=differences,
        max_relative=largest,
    )


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|), 0 for equal numbers and for two NaN, inf if it is not defined."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    relative = abs(a - b) / max(abs(a), abs(b))
    return relative if math.isfinite(relative) else math.inf


def _common_positions(a: "array[int]", b: "array[int]") -> "tuple[array[int], array[int]]":
    """Return the positions in both of the numbers that two ascending arrays have in common."""
    in_a, in_b, i, j = array("q"), array("q"), 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            in_a.append(i)
            in_b.append(j)
        i, j = i + (a[i] <= b[j]), j + (b[j] <= a[i])
    return in_a, in_b


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value

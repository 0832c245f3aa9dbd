"""All steps of a file of events as columns. Blocks of steps are parsed at once, which is faster."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, itemgetter, le
from typing import Any

from paceline.events import MAX_TIME, Event, EventReader, Started, Step
from paceline.events.lines import is_all_steps, is_step, split_at_others
from paceline.units import without_controls

QUANTITIES = ("loss", "grad_norm", "lr", "step_s", "data_s", "samples_per_s")
NAMED_LOSS = "losses/"  # begins the quantity of a loss that a task returns by name
_COLUMNS = ("time", "event", "step", "samples", *QUANTITIES)
_PICK = itemgetter(*_COLUMNS)


@dataclass(frozen=True)
class StepBatch:
    """Consecutive steps in ascending order. Absent values are NaN.

    positions: of the lines in the file, in bytes.
    values: by quantity: those of QUANTITIES, and losses/NAME."""

    positions: Sequence[int]
    times: Sequence[float]
    steps: Sequence[int]
    samples: Sequence[int]
    values: dict[str, Sequence[float]]

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, begin: int, end: int) -> "StepBatch":
        return StepBatch(
            self.positions[begin:end],
            self.times[begin:end],
            self.steps[begin:end],
            self.samples[begin:end],
            {name: values[begin:end] for name, values in self.values.items()},
        )


def read_batches(reader: EventReader, end: int | None = None) -> Iterator[tuple[int, Started] | StepBatch]:
    """Yield the steps since the last call, and each start with its position, in the order of the file.

    end: the position in bytes at which to stop [default: the end of the file]."""
    for block in reader.blocks():
        position = reader.position - len(block)
        if end is not None:
            block = block[: max(0, end - position)]
        for part in split_at_others(block):
            yield from _read_part(reader, part, position)
            position += len(part)
        if end is not None and reader.position >= end:
            return


def _read_part(reader: EventReader, part: bytes, position: int) -> Iterator[tuple[int, Started] | StepBatch]:
    """Yield what the lines of a part of a block contain, which begins at a position."""
    lines = part.split(b"\n")[:-1]
    positions = [*map(add, accumulate(map(len, lines[:-1]), initial=position), range(len(lines)))]
    if is_all_steps(part):
        yield from _parse_steps(reader, lines, positions)
        return
    begin = 0
    for at, line in enumerate([*lines, b""]):
        if at < len(lines) and is_step(line):
            continue
        yield from _parse_steps(reader, lines[begin:at], positions[begin:at])
        begin = at + 1
        event = reader.skipped.parse(line) if at < len(lines) else None
        if isinstance(event, Started):
            yield positions[at], event
        elif isinstance(event, Step):  # in the format of another program
            yield _collect([(positions[at], event)])


def _parse_steps(reader: EventReader, lines: list[bytes], positions: list[int]) -> Iterator[StepBatch]:
    if not lines:
        return
    batch = _parse_at_once(lines, positions)
    if batch is None:  # a line is damaged, or a step has unusual values
        parsed = [
            (position, event)
            for position, line in zip(positions, lines, strict=False)
            if isinstance(event := reader.skipped.parse(line), Step)
        ]
        batch = _collect(parsed)
    descents = (
        [at for at, (before, after) in enumerate(pairwise(batch.steps), 1) if after <= before]
        if any(map(le, batch.steps[1:], batch.steps))
        else []
    )
    for begin, end in pairwise([0, *descents, len(batch)]):
        if end > begin:
            yield batch.part(begin, end)


def _parse_at_once(lines: list[bytes], positions: list[int]) -> StepBatch | None:
    """Return the steps of lines, or None unless every line certainly is a valid step."""
    try:
        found: list[dict[str, Any]] = json.loads((b"[" + b",".join(lines) + b"]").decode("ascii"))
        if len(found) != len(lines):
            return None
        times, kinds, steps, samples, *values = zip(*map(_PICK, found), strict=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    norms = values[1]
    if None in norms:
        values[1] = tuple(math.nan if norm is None else norm for norm in norms)
    if (
        set(kinds) != {"step"}
        or any(set(map(type, column)) - {float} for column in (times, *values))
        or any(set(map(type, column)) - {int} for column in (steps, samples))
        or not math.isfinite(sum(times))
        or not 0 <= min(times) <= max(times) < MAX_TIME
        or max(*steps, *samples) >= 2**63
        or min(*steps, *samples) <= -(2**63)
    ):
        return None
    named = [step.get("losses") for step in found]
    columns: dict[str, Sequence[float]] = dict(zip(QUANTITIES, values, strict=True))
    if any(losses is not None for losses in named):
        if any(
            type(losses) is not dict or any(type(value) is not float for value in losses.values())
            for losses in named
            if losses is not None
        ):
            return None
        columns |= _name_losses([losses or {} for losses in named])
    return StepBatch(positions, times, steps, samples, columns)


def _name_losses(losses: Sequence[Any]) -> dict[str, Sequence[float]]:
    names = dict.fromkeys(name for step in losses for name in step)
    return {
        NAMED_LOSS + without_controls(name): [step.get(name, math.nan) for step in losses] for name in names
    }


def _collect(found: Sequence[tuple[int, Event]]) -> StepBatch:
    steps = [event for _, event in found if isinstance(event, Step)]
    columns: dict[str, Sequence[float]] = {
        name: [math.nan if (value := getattr(step, name)) is None else value for step in steps]
        for name in QUANTITIES
    }
    return StepBatch(
        [position for position, _ in found],
        [step.time for step in steps],
        [step.step for step in steps],
        [step.samples for step in steps],
        columns | _name_losses([step.losses for step in steps]),
    )

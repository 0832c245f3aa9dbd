"""The quantities of all steps of a run in bounded memory, with their extremes.

Steps are grouped into buckets of equal numbers of steps: 1 up to MAX_BUCKETS steps, so that the curves of a
short run are exact; then neighbours are merged, which doubles that number. A bucket has the lowest, highest,
last and mean finite value of each quantity, so that a spike of one step remains visible.
"""

import bisect
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, count
from operator import lt, sub
from typing import Any

from paceline.events import Started
from paceline.report.step_batches import NAMED_LOSS, StepBatch

MAX_BUCKETS = 2**15
MAX_NAMED_LOSSES = 32  # quantities besides those that every step has; others are counted in `omitted`
MAX_OMITTED = 10**5
CLOCK_BACK_S = 1.0  # a time earlier than the previous by more than this shows that the clock was set back

MAX_CLOCK_JUMPS = 1000

Reread = Callable[[int, int], Iterable[tuple[int, Started] | StepBatch]]


@dataclass
class BucketColumn:
    """A quantity by bucket. A bucket without finite values has the lowest value inf and the highest -inf."""

    low: "array[float]" = field(default_factory=lambda: array("d"))
    high: "array[float]" = field(default_factory=lambda: array("d"))
    last: "array[float]" = field(default_factory=lambda: array("d"))
    total: "array[float]" = field(default_factory=lambda: array("d"))  # of the finite values
    count: "array[int]" = field(default_factory=lambda: array("q"))  # of the finite values

    def append(self, values: Sequence[float]) -> None:
        self.append_group(*_reduce(values))

    def append_empty(self, count: int) -> None:
        for array_, value in ((self.low, math.inf), (self.high, -math.inf), (self.last, math.nan)):
            array_.extend([value] * count)
        self.total.extend([0.0] * count)
        self.count.extend([0] * count)

    def extend(self, values: Sequence[float]) -> None:
        """Append a bucket for each value."""
        if math.isfinite(sum(values)):
            for array_ in (self.low, self.high, self.last, self.total):
                array_.extend(values)
            self.count.extend([1] * len(values))
        else:
            for value in values:
                self.append((value,))

    def merge_into_last(self, values: Sequence[float]) -> None:
        low, high, last, total, count = _reduce(values)
        self.low[-1], self.high[-1] = min(self.low[-1], low), max(self.high[-1], high)
        self.last[-1], self.total[-1], self.count[-1] = last, self.total[-1] + total, self.count[-1] + count

    def group(self, begin: int, end: int) -> tuple[float, float, float, float, int]:
        """Return lowest, highest, last, total and count of the buckets from `begin` to `end`."""
        return (
            min(self.low[begin:end]),
            max(self.high[begin:end]),
            self.last[end - 1],
            sum(self.total[begin:end]),
            sum(self.count[begin:end]),
        )

    def group_all(self, begin: int, end: int, size: int) -> list[tuple[float, float, float, float, int]]:
        """Return `group` of each `size` buckets from `begin` to `end`, the last of which may be fewer."""
        if begin >= end:
            return []
        if size == 1:
            return [*zip(*(array_[begin:end] for array_ in self.arrays), strict=True)]
        import numpy as np  # most commands do not need it

        starts = np.arange(0, end - begin, size)
        low, high, last, total, count = (np.array(array_[begin:end]) for array_ in self.arrays)
        columns = (
            np.minimum.reduceat(low, starts),
            np.maximum.reduceat(high, starts),
            np.append(last[starts[1:] - 1], last[-1:]),
            np.add.reduceat(total, starts),
            np.add.reduceat(count, starts),
        )
        return [*zip(*(column.tolist() for column in columns), strict=True)]

    def halve(self) -> None:
        groups = [self.group(at, at + 2) for at in range(0, len(self.low) - 1, 2)]
        if len(self.low) % 2:
            groups.append(self.group(len(self.low) - 1, len(self.low)))
        self.truncate(0)
        for group in groups:
            self.append_group(*group)

    def truncate(self, size: int) -> None:
        for array_ in self.arrays:
            del array_[size:]

    @property
    def arrays(self) -> "tuple[array[Any], ...]":
        return self.low, self.high, self.last, self.total, self.count

    def append_group(self, low: float, high: float, last: float, total: float, count: int) -> None:
        self.low.append(low)
        self.high.append(high)
        self.last.append(last)
        self.total.append(total)
        self.count.append(count)


def keep_last_of_pairs(*arrays: "array[Any]") -> None:
    """Keep only the last of each two neighbouring values, in place. A value without a neighbour stays."""
    for array_ in arrays:
        array_[:] = array_[1::2] + array_[len(array_) - len(array_) % 2 :]


def _reduce(values: Sequence[float]) -> tuple[float, float, float, float, int]:
    total = sum(values)
    if math.isfinite(total):
        return min(values), max(values), values[-1], total, len(values)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.inf, -math.inf, values[-1], 0.0, 0
    return min(finite), max(finite), values[-1], sum(finite), len(finite)


class StepCurves:
    """All quantities of the steps by bucket. A repeated step replaces itself and all later steps.

    reread: yields the steps and starts between two positions of the file again. It is required to cut a
    bucket of several steps exactly."""

    def __init__(self, reread: Reread | None = None):
        self.width = 1  # steps per bucket
        # by bucket: the position of its first line; its first and last step; its number of steps; samples,
        # time, and seconds of training after its last step; and the time at which its first step began
        self.positions, self.firsts, self.steps = array("q"), array("q"), array("q")
        self.counts, self.samples = array("q"), array("q")
        self.times, self.elapsed, self.begins = array("d"), array("d"), array("d")
        self.columns: dict[str, BucketColumn] = {}
        self.omitted: set[str] = set()  # named losses beyond MAX_NAMED_LOSSES
        self.clock_jumps: list[
            tuple[int, float]
        ] = []  # steps, and by how many seconds the clock was set back
        self.rewinds = 0  # how often buckets besides the last were merged or removed
        self._reread = reread
        self.time: float | None = None  # time of the previous step or start

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def arrays(self) -> "tuple[array[Any], ...]":
        own = (self.positions, self.firsts, self.steps, self.counts, self.samples)
        return (*own, self.times, self.elapsed, self.begins)

    def expect_steps(self, count: int) -> None:
        """Begin with wider buckets, if there are at least that many steps: fewer of them are merged later."""
        while self.width * 2 * MAX_BUCKETS <= count:
            self.width *= 2

    def find_not_finite(self, name: str) -> tuple[int, int, int] | None:
        """Return how many steps have no finite value, and the first and last step of their first bucket.

        None if there are none. Of a named loss, which steps may lack, the result is None."""
        column = self.columns.get(name)
        if column is None or name.startswith(NAMED_LOSS):
            return None
        at = next(compress(count(), map(lt, column.count, self.counts)), None)
        if at is None:
            return None
        return sum(self.counts) - sum(column.count), self.firsts[at], self.steps[at]

    def start(self, started: Started, position: int) -> None:
        self.cut(started.step, position)
        self.time = started.time

    def add(self, batch: StepBatch) -> None:
        if not len(batch):
            return
        if self.steps and batch.steps[0] <= self.steps[-1]:
            self.cut(batch.steps[0] - 1, batch.positions[0])
        elapsed, begins = self._measure_time(batch)
        for name in batch.values:
            self._add_column(name)
        begin = 0
        if self.steps and self.counts[-1] < self.width:
            begin = min(self.width - self.counts[-1], len(batch))
            self._merge_into_last(batch.part(0, begin), elapsed[begin - 1])
        if self.width == 1:
            self._extend(batch, elapsed, begins)
        else:
            for at in range(begin, len(batch), self.width):
                end = min(at + self.width, len(batch))
                self._append(batch.part(at, end), elapsed[end - 1], begins[at])
        while len(self) > MAX_BUCKETS:
            self._halve()

    def _measure_time(self, batch: StepBatch) -> tuple[list[float], list[float]]:
        """Return for each step the seconds of training so far, and the time at which the step began.

        A clock that was set back must not stop or reverse the axis: such a step counts with its own
        duration."""
        before = self.elapsed[-1] if self.elapsed else 0.0
        reference = self.time if self.time is not None else batch.times[0] - batch.values["step_s"][0]
        latest = [*accumulate(chain((reference,), batch.times), max)]
        if max(map(sub, latest[1:], batch.times)) <= CLOCK_BACK_S:
            self.time = latest[-1]
            return [before + time - reference for time in latest[1:]], latest[:-1]
        elapsed, begins = [], []
        for step, time, step_s in zip(batch.steps, batch.times, batch.values["step_s"], strict=True):
            if reference - time > CLOCK_BACK_S:
                if len(self.clock_jumps) < MAX_CLOCK_JUMPS:
                    self.clock_jumps.append((step, reference - time))
                before += max(0.0, step_s) if math.isfinite(step_s) else 0.0
                begins.append(time)
                reference = time
            else:
                begins.append(reference)
                before += max(0.0, time - reference)
                reference = max(reference, time)
            elapsed.append(before)
        self.time = reference
        return elapsed, begins

    def _add_column(self, name: str) -> None:
        if name in self.columns:
            return
        named = sum(column.startswith(NAMED_LOSS) for column in self.columns)
        if name.startswith(NAMED_LOSS) and named >= MAX_NAMED_LOSSES:
            if len(self.omitted) < MAX_OMITTED:
                self.omitted.add(name)
            return
        self.columns[name] = column = BucketColumn()
        column.append_empty(len(self))

    def _extend(self, batch: StepBatch, elapsed: list[float], begins: list[float]) -> None:
        ones = [1] * len(batch)
        numbers: tuple[Sequence[float], ...] = (batch.positions, batch.steps, batch.steps)
        own = (*numbers, ones, batch.samples, batch.times, elapsed, begins)
        for array_, values in zip(self.arrays, own, strict=True):
            array_.extend(values)
        for name, column in self.columns.items():
            if name in batch.values:
                column.extend(batch.values[name])
            else:
                column.append_empty(len(batch))

    def _append(self, part: StepBatch, elapsed: float, begin: float) -> None:
        last = (part.steps[-1], len(part), part.samples[-1], part.times[-1], elapsed, begin)
        for array_, value in zip(self.arrays, (part.positions[0], part.steps[0], *last), strict=True):
            array_.append(value)
        for name, column in self.columns.items():
            if name in part.values:
                column.append(part.values[name])
            else:
                column.append_empty(1)

    def _merge_into_last(self, part: StepBatch, elapsed: float) -> None:
        self.steps[-1], self.samples[-1] = part.steps[-1], part.samples[-1]
        self.counts[-1] += len(part)
        self.times[-1], self.elapsed[-1] = part.times[-1], elapsed
        for name, column in self.columns.items():
            column.merge_into_last(part.values.get(name, (math.nan,)))

    def _halve(self) -> None:
        """Merge each two neighbouring buckets."""
        self.width *= 2
        self.rewinds += 1
        pairs = range(0, len(self) - 1, 2)
        single = [len(self) - 1] if len(self) % 2 else []
        counts = [self.counts[at] + self.counts[at + 1] for at in pairs] + [self.counts[at] for at in single]
        firsts: tuple[array[Any], ...] = (self.positions, self.firsts, self.begins)
        for array_ in firsts:
            array_[:] = array_[::2]
        keep_last_of_pairs(self.steps, self.samples, self.times, self.elapsed)
        self.counts[:] = array("q", counts)
        for column in self.columns.values():
            column.halve()

    def cut(self, step: int, position: int) -> None:
        """Remove the steps after `step`, because the line at `position` replaces them."""
        kept = bisect.bisect_right(self.steps, step)
        if kept == len(self):
            return
        self.rewinds += 1
        straddles = self.firsts[kept] <= step
        begin, begin_time = self.positions[kept], self.begins[kept]
        for array_ in self.arrays:
            del array_[kept:]
        for column in self.columns.values():
            column.truncate(kept)
        self.clock_jumps = [jump for jump in self.clock_jumps if jump[0] <= step]
        if self.steps:
            self.time = self.times[-1]
        if straddles and self._reread is not None:
            self._restore(begin, position, begin_time, step)

    def _restore(self, begin: int, end: int, begin_time: float, step: int) -> None:
        """Read the steps up to `step` of the cut bucket, which begins at the position `begin`, again."""
        replayed = StepCurves()
        replayed.columns = {name: BucketColumn() for name in self.columns}
        replayed.time = begin_time
        after = self.steps[-1] if self.steps else -(2**63)
        for item in self._reread(begin, end) if self._reread is not None else ():
            if isinstance(item, tuple):
                replayed.start(item[1], item[0])
                continue
            first = bisect.bisect_right(item.steps, after)
            replayed.add(item.part(first, bisect.bisect_right(item.steps, step)))
        if not len(replayed):
            return
        before = self.elapsed[-1] if self.elapsed else 0.0
        values = (
            begin,
            replayed.firsts[0],
            replayed.steps[-1],
            sum(replayed.counts),
            replayed.samples[-1],
            replayed.times[-1],
            before + replayed.elapsed[-1],
            begin_time,
        )
        for array_, value in zip(self.arrays, values, strict=True):
            array_.append(value)
        for name, column in self.columns.items():
            column.append_group(*replayed.columns[name].group(0, len(replayed)))
        self.time = replayed.times[-1]

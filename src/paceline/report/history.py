"""The steps of a run in bounded memory: all steps of a short run, or evenly spaced steps and exact sums."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from paceline.events import Step

MAX_POINTS = 2**15  # of a history after it was thinned; before, it has up to twice as many


class HistoryPoint(NamedTuple):
    """A step that represents itself and the steps before it, back to the previous point."""

    step: int
    loss: float
    step_s: float
    data_s: float
    samples_per_s: float
    num_steps: int  # represented
    total_step_s: float  # of all represented steps
    total_data_s: float

    @classmethod
    def from_event(cls, event: Step, count: int = 1) -> "HistoryPoint":
        sums = (event.step_s * count, event.data_s * count)
        return cls(event.step, event.loss, event.step_s, event.data_s, event.samples_per_s, count, *sums)

    def merge(self, later: "HistoryPoint") -> "HistoryPoint":
        return later._replace(
            num_steps=self.num_steps + later.num_steps,
            total_step_s=self.total_step_s + later.total_step_s,
            total_data_s=self.total_data_s + later.total_data_s,
        )

    def truncate(self, step: int, begin: int) -> "HistoryPoint":
        """Return the point, which represents steps after `begin`, without the steps after `step`."""
        share = (step - begin) / max(1, self.step - begin)
        left = max(1, round(self.num_steps * share))
        return self._replace(
            step=step,
            num_steps=left,
            total_step_s=self.total_step_s * share,
            total_data_s=self.total_data_s * share,
        )


@dataclass
class _Sums:
    """Sums over the first points. They are added in the order of the points."""

    points: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    data_s: float = 0.0


class _SortedRates:
    """The durations and rates of the points from one on, ascending, each with its number of steps."""

    def __init__(self, first: int):
        self.first = self.until = first  # points
        self.step_s: list[tuple[float, int]] = []
        self.samples_per_s: list[tuple[float, int]] = []

    def extend(self, points: Sequence[HistoryPoint]) -> None:
        self.until += len(points)
        self.step_s += [(point.step_s, point.num_steps) for point in points]
        self.samples_per_s += [(point.samples_per_s, point.num_steps) for point in points]
        for values in (self.step_s, self.samples_per_s):
            values.sort()  # of values that are mostly sorted, this takes linear time


class History:
    """Steps in ascending order. A repeated step replaces itself and all later steps: the run was resumed.

    Sums and medians continue from those of the last call."""

    def __init__(self) -> None:
        self.points: list[HistoryPoint] = []
        self.first: HistoryPoint | None = None  # it is never removed
        self._sums, self._rates = _Sums(), _SortedRates(0)

    def add(self, event: Step, count: int = 1) -> None:
        if self.points and event.step <= self.points[-1].step:
            self.cut(event.step - count)
        self.points.append(HistoryPoint.from_event(event, count))
        self.first = self.first or self.points[-1]
        if len(self.points) > 2 * MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            unpaired = self.points[-1:] if len(self.points) % 2 else []
            self.points = [earlier.merge(later) for earlier, later in pairs] + unpaired
            self._forget()

    def cut(self, step: int) -> None:
        """Remove the steps after `step`."""
        at = bisect.bisect_right(self.points, step, key=lambda point: point.step)
        if at == len(self.points) and (self.first is None or self.first.step <= step):
            return
        straddling = self.points[at] if at < len(self.points) else None
        del self.points[at:]
        begin = (
            self.points[-1].step
            if self.points
            else (straddling.step - straddling.num_steps if straddling is not None else 0)
        )
        if straddling is not None and straddling.num_steps > 1 and begin < step:
            self.points.append(straddling.truncate(step, begin))
        if self.first is not None and self.first.step > step:
            self.first = None
        self._forget()

    def _forget(self) -> None:
        self._sums, self._rates = _Sums(), _SortedRates(0)

    def _sum_up(self) -> _Sums:
        sums = self._sums
        for point in self.points[sums.points :] if sums.points else self.points:
            sums.num_steps += point.num_steps
            sums.step_s += point.total_step_s
            sums.data_s += point.total_data_s
        sums.points = len(self.points)
        return sums

    def find_medians(self, step: int) -> tuple[float | None, float | None]:
        """Return the medians of step_s and samples_per_s over the steps after `step`, or over all if none is.

        None if there are no steps."""
        first = bisect.bisect_right(self.points, step, key=lambda point: point.step)
        if first == len(self.points):
            first = 0
        if self._rates.first != first:
            self._rates = _SortedRates(first)
        self._rates.extend(self.points[self._rates.until :])
        pick = _median_of_counted if self.is_thinned else _median_of_single
        return pick(self._rates.step_s), pick(self._rates.samples_per_s)

    @property
    def num_steps(self) -> int:
        return self._sum_up().num_steps

    @property
    def step_s(self) -> float:
        return self._sum_up().step_s

    @property
    def data_s(self) -> float:
        return self._sum_up().data_s

    @property
    def is_thinned(self) -> bool:
        return self.num_steps > len(self.points)


class TimeSpent:
    """Seconds spent at some steps, in bounded memory."""

    def __init__(self) -> None:
        self._at: list[tuple[int, float]] = []

    def add(self, step: int, seconds: float) -> None:
        self._at.append((step, seconds))
        if len(self._at) > 2 * MAX_POINTS:
            pairs = zip(self._at[::2], self._at[1::2], strict=False)
            unpaired = self._at[-1:] if len(self._at) % 2 else []
            self._at = [(step, earlier + later) for (_, earlier), (step, later) in pairs] + unpaired

    def cut(self, step: int) -> None:
        self._at = [entry for entry in self._at if entry[0] <= step]

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self._at)


def _median_of_single(values: Sequence[tuple[float, int]]) -> float | None:
    """Return the median of ascending (value, 1) pairs; None if there are none."""
    middle = len(values) // 2
    return (values[middle][0] + values[~middle][0]) / 2 if values else None


def _median_of_counted(values: Sequence[tuple[float, int]]) -> float | None:
    """Return the median of ascending (value, count) pairs; None if there are none."""
    half, before = sum(map(itemgetter(1), values)) / 2, 0
    for at, (value, count) in enumerate(values):
        before += count
        if before > half:
            return value
        if before == half:
            return (value + values[at + 1][0]) / 2
    return None

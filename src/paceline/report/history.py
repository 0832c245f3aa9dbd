"""The steps of a run in bounded memory: all steps of a short run, or evenly spaced steps and exact sums."""

import bisect
from collections.abc import Iterable, Sequence
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


class History:
    """Steps in ascending order. A repeated step replaces itself and all later steps: the run was resumed."""

    def __init__(self) -> None:
        self.points: list[HistoryPoint] = []
        self.first: HistoryPoint | None = None  # it is never removed

    def add(self, event: Step, count: int = 1) -> None:
        if self.points and event.step <= self.points[-1].step:
            self.cut(event.step - count)
        self.points.append(HistoryPoint.from_event(event, count))
        self.first = self.first or self.points[-1]
        if len(self.points) > 2 * MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            unpaired = self.points[-1:] if len(self.points) % 2 else []
            self.points = [earlier.merge(later) for earlier, later in pairs] + unpaired

    def cut(self, step: int) -> None:
        """Remove the steps after `step`."""
        at = bisect.bisect_right(self.points, step, key=lambda point: point.step)
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

    @property
    def num_steps(self) -> int:
        return sum(point.num_steps for point in self.points)

    @property
    def step_s(self) -> float:
        return sum(point.total_step_s for point in self.points)

    @property
    def data_s(self) -> float:
        return sum(point.total_data_s for point in self.points)

    @property
    def is_thinned(self) -> bool:
        return any(point.num_steps > 1 for point in self.points)


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


def median(values: Iterable[tuple[float, int]]) -> float | None:
    """Return the median of (value, count) pairs; None if there are none."""
    ordered: Sequence[tuple[float, int]] = sorted(values)
    half, before = sum(count for _, count in ordered) / 2, 0
    for at, (value, count) in enumerate(ordered):
        before += count
        if before > half:
            return value
        if before == half:
            return (value + ordered[at + 1][0]) / 2
    return None

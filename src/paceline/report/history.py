"""The steps of a run in bounded memory: every step of a short run, evenly spaced ones of a long run, and the sums of all."""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.events import Step

MOST = 2**15  # points of a history that was thinned; half of what it has at the most


class HistoryPoint(NamedTuple):
    """A step, and how many steps it stands for: those before it, back to the point before, and itself."""

    step: int
    loss: float
    step_s: float
    data_s: float
    samples_per_s: float
    num_steps: int
    total_step_s: float  # of all steps that it stands for
    total_data_s: float

    @classmethod
    def of(cls, event: Step, count: int = 1) -> "HistoryPoint":
        sums = (event.step_s * count, event.data_s * count)
        return cls(event.step, event.loss, event.step_s, event.data_s, event.samples_per_s, count, *sums)

    def joined(self, later: "HistoryPoint") -> "HistoryPoint":
        return later._replace(
            num_steps=self.num_steps + later.num_steps,
            total_step_s=self.total_step_s + later.total_step_s,
            total_data_s=self.total_data_s + later.total_data_s,
        )

    def until(self, step: int, begin: int) -> "HistoryPoint":
        """Return what is left of a point that begins behind step `begin`, where the steps after `step` are taken away."""
        share = (step - begin) / max(1, self.step - begin)
        left = max(1, round(self.num_steps * share))
        return self._replace(
            step=step,
            num_steps=left,
            total_step_s=self.total_step_s * share,
            total_data_s=self.total_data_s * share,
        )


class History:
    """Steps in rising order. A step that comes again takes the place of itself and of all after it: the run was resumed before it."""

    def __init__(self) -> None:
        self.points: list[HistoryPoint] = []
        self.first: HistoryPoint | None = None  # it is never thinned out

    def add(self, event: Step, count: int = 1) -> None:
        if self.points and event.step <= self.points[-1].step:
            self.cut(event.step - count)
        self.points.append(HistoryPoint.of(event, count))
        self.first = self.first or self.points[-1]
        if len(self.points) > 2 * MOST:
            self.points = [
                one.joined(two) for one, two in zip(self.points[::2], self.points[1::2], strict=False)
            ] + (self.points[-1:] if len(self.points) % 2 else [])

    def cut(self, step: int) -> None:
        """Forget the steps after this one."""
        at = bisect.bisect_right(self.points, step, key=lambda point: point.step)
        straddling = self.points[at] if at < len(self.points) else None
        del self.points[at:]
        begin = (
            self.points[-1].step
            if self.points
            else (straddling.step - straddling.num_steps if straddling is not None else 0)
        )
        if straddling is not None and straddling.num_steps > 1 and begin < step:
            self.points.append(straddling.until(step, begin))
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
    """Seconds that something took at some steps, in bounded memory."""

    def __init__(self) -> None:
        self._at: list[tuple[int, float]] = []

    def add(self, step: int, seconds: float) -> None:
        self._at.append((step, seconds))
        if len(self._at) > 2 * MOST:
            pairs = zip(self._at[::2], self._at[1::2], strict=False)
            self._at = [(later, one + two) for (_, one), (later, two) in pairs] + (
                self._at[-1:] if len(self._at) % 2 else []
            )

    def cut(self, step: int) -> None:
        self._at = [one for one in self._at if one[0] <= step]

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self._at)


def median(values: Iterable[tuple[float, int]]) -> float | None:
    """Return the median of values that each stand for so many; None where there are none."""
    ordered: Sequence[tuple[float, int]] = sorted(values)
    half, before = sum(count for _, count in ordered) / 2, 0
    for at, (value, count) in enumerate(ordered):
        before += count
        if before > half:
            return value
        if before == half:
            return (value + ordered[at + 1][0]) / 2
    return None

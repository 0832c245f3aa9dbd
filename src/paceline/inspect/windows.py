"""Windows: the samples of a node while the training stepped, by which rules judge its machine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.monitor.table import SampleTable

IDLE_PERCENT = 1.0  # utilization of a GPU before and after a job


@dataclass(frozen=True)
class Window:
    """The samples of a node between two indices, without the time before and after the work.

    is_one_of_several  whether there are other nodes, so that sentences must name this one
    """

    samples: SampleTable
    begin: int
    end: int
    is_one_of_several: bool = False

    @property
    def node(self) -> str:
        return self.samples.node or self.samples.path.stem

    @property
    def gpus(self) -> list[int]:
        return self.samples.numbers("gpu")

    @property
    def ranks(self) -> list[int]:
        return self.samples.numbers("rank")

    @cached_property
    def duration_s(self) -> float:
        """The time of the samples, with the interval after the last; their number without a clock."""
        times = self.samples.time[self.begin : self.end]
        if len(times) < 2:
            return 0.0
        return times[-1] - times[0] + (self.samples.interval_s or 0.0 if self.samples.has_clock else 1.0)

    def values(self, name: str) -> list[float]:
        """Return the values of a column without missing ones; none if the file lacks it."""
        column = self.samples.columns.get(name)
        return [value for value in column[self.begin : self.end] if value == value] if column else []

    def pairs(self, *names: str) -> list[tuple[float, ...]]:
        """Return the samples that have values of all these columns."""
        columns = [self.samples.columns.get(name) for name in names]
        if any(column is None for column in columns):
            return []
        rows = zip(*(column[self.begin : self.end] for column in columns if column is not None), strict=True)
        return [row for row in rows if all(value == value for value in row)]

    def timed(self, name: str) -> list[tuple[float, float]]:
        """Return the times and values of a column."""
        column = self.samples.columns.get(name)
        if column is None:
            return []
        rows = zip(self.samples.time[self.begin : self.end], column[self.begin : self.end], strict=True)
        return [(time, value) for time, value in rows if value == value]


def cut_windows(
    recordings: Sequence[SampleTable], begin: float | None, end: float | None
) -> tuple[Window, ...]:
    """Return the window of each file: from `begin` to `end`, seconds since the epoch.

    None: a recording without a run, from the first to the last sample in which a GPU worked."""
    known = [samples for samples in recordings if len(samples)]
    windows = []
    for samples in known:
        is_within: Callable[[int], bool]
        if begin is None or end is None:
            is_within = _is_busy(samples)
        else:
            low, high, times = begin, end, samples.time
            is_within = lambda at: low <= times[at] <= high  # noqa: E731, B023
        inside = [at for at in range(len(samples)) if is_within(at)]
        if inside:
            windows.append(Window(samples, inside[0], inside[-1] + 1, len(known) > 1))
    return tuple(windows)


def _is_busy(samples: SampleTable) -> Callable[[int], bool]:
    """Return whether any GPU worked in a sample, or a function that is always true if none ever did."""
    columns = [
        samples[name] for name in samples.columns if name.endswith(" utilization") and "mem" not in name
    ]
    columns = [column for column in columns if any(value > IDLE_PERCENT for value in column)]
    if not columns:
        return lambda at: True
    busy = [any(column[at] > IDLE_PERCENT for column in columns) for at in range(len(samples))]
    # A short use of the GPU in a long recording is no job that begins and ends.
    inside = busy[busy.index(True) : len(busy) - busy[::-1].index(True)]
    if len(inside) < MIN_BUSY_SHARE * len(busy):
        return lambda at: True
    return busy.__getitem__


MIN_BUSY_SHARE = 0.5


def block_medians(values: Sequence[float], count: int) -> list[float]:
    """Return the medians of `count` equal parts of a series of at least `count` values."""
    size = len(values) / count
    return [statistics.median(values[round(k * size) : round((k + 1) * size)]) for k in range(count)]

"""Windows: the samples of a node while the training stepped, by which rules judge its machine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.monitor.columns import kind_of
from paceline.monitor.table import SampleTable
from paceline.units import format_seconds

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
        return [row[1:] for row in self.timed_rows(*names)]

    def timed(self, name: str) -> list[tuple[float, float]]:
        """Return the times and values of a column."""
        return [(time, value) for time, value in self.timed_rows(name)]

    def timed_rows(self, *names: str) -> list[tuple[float, ...]]:
        """Return the time and the values of the samples that have values of all these columns."""
        if any(name not in self.samples.columns for name in names):
            return []
        columns = [self.samples.time, *(self.samples.columns[name] for name in names)]
        rows = zip(*(column[self.begin : self.end] for column in columns), strict=True)
        return [row for row in rows if all(value == value for value in row)]


LOST_SAMPLES = 10  # without a value, after which a sensor has disappeared


def describe_lost_gpus(windows: Sequence[Window]) -> list[str]:
    """Return a sentence for each GPU whose samples end long before those of its node."""
    notes = []
    for window in windows:
        for gpu in window.gpus:
            times = [time for time, _ in window.timed(f"gpu{gpu} utilization")]
            if len(times) < LOST_SAMPLES:
                continue
            all_times = window.samples.time[window.begin : window.end]
            if sum(time > times[-1] for time in all_times) < LOST_SAMPLES:
                continue
            name = f"GPU {gpu} of {window.node}" if window.is_one_of_several else f"GPU {gpu}"
            after = format_seconds(times[-1] - all_times[0])
            whole = format_seconds(window.duration_s)
            notes.append(f"{name} has no samples after {after} of {whole}: it or its sensor disappeared")
    return notes


CLOCK_S = 60.0  # between the samples of a node and the steps of a run, which a start or an end may take


def describe_other_times(recordings: Sequence[SampleTable], begin: float, end: float) -> list[str]:
    """Return a sentence for each node all of whose samples were taken long before or after the steps."""
    notes = []
    for samples in recordings:
        if not len(samples):
            continue
        late_s, early_s = min(samples.time) - end, begin - max(samples.time)
        if max(late_s, early_s) > CLOCK_S:
            when = "after the last" if late_s > 0 else "before the first"
            name, away = samples.node or samples.path.stem, format_seconds(max(late_s, early_s))
            notes.append(
                f"the samples of {name} were taken {away} {when} step by the clock of rank 0, and are left "
                "out: they belong to another start, or a clock differs"
            )
    return notes


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
    first, last = busy.index(True), len(busy) - busy[::-1].index(True)
    if last - first < MIN_BUSY_SHARE * len(busy) and not _is_unallocated_outside(samples, first, last):
        return lambda at: True
    return busy.__getitem__


MIN_BUSY_SHARE = 0.5
MAX_FREE_SHARE = 0.5  # of the memory that a job uses, which is in use before and after it


def _is_unallocated_outside(samples: SampleTable, first: int, last: int) -> bool:
    """Return whether the memory of the GPUs shows that the job began and ended at these samples."""
    columns = [samples[name] for name in samples.columns if kind_of(name) == "gpuN memory used"]
    for column in columns:
        inside = [value for value in column[first:last] if value == value]
        outside = [value for value in (*column[:first], *column[last:]) if value == value]
        if inside and outside and statistics.median(outside) < MAX_FREE_SHARE * statistics.median(inside):
            return True
    return False


def block_medians(values: Sequence[float], count: int) -> list[float]:
    """Return the medians of `count` equal parts of a series of at least `count` values."""
    size = len(values) / count
    return [statistics.median(values[round(k * size) : round((k + 1) * size)]) for k in range(count)]

"""Samples in memory, by column."""

import itertools
import statistics
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.monitor.columns import number_of

NAN = float("nan")


@dataclass(frozen=True)
class FilePosition:
    """How far a file was read; `read_samples` continues there. FilePosition(0, 0) is the beginning.

    end        position in bytes after the last line that was read
    section    position in bytes of the comments and the header that belong to it
    gpus       names of the GPUs of a recording without indices, in the order of their numbers
    num_lines  lines of a whole sample of a recording
    samples    number of samples before; they number the samples of a recording without timestamps
    """

    end: int
    section: int
    gpus: tuple[str, ...] = ()
    num_lines: int = 0
    samples: int = 0


@dataclass
class SampleTable:
    """The samples of a file, by column. All columns have the length of `time`; a missing value is NaN.

        samples = read_samples(Path("runs/a/monitor/node17.csv"))
        print(samples.node, samples["gpu0 utilization"], samples.units["gpu0 utilization"])

    path       the file
    node       name of the node; empty if the file does not have it
    source     "paceline" or "nvidia-smi"
    time       seconds since the epoch, by the clock of the file system; without a clock, 0, 1, 2 …
    has_clock  whether `time` contains times
    columns    values by name of the column, without its unit
    units      units by name of the column
    comments   what the header reports, by topic: "cpu", "gpu0", "rank3"
    absent     why sensors or columns have no values, by sensor or column
    sections   indices of the samples at which a sampler started; time may have passed before them
    damaged    number of lines that could not be used
    ignored    fields of nvidia-smi that have no column
    notes      sentences for the user
    restarted  whether the file was replaced, so that it was read from its beginning
    position   where to continue
    """

    path: Path
    node: str = ""
    source: str = "paceline"
    time: "array[float]" = field(default_factory=lambda: array("d"))
    has_clock: bool = True
    columns: dict[str, "array[float]"] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    sections: list[int] = field(default_factory=list)
    damaged: int = 0
    ignored: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    restarted: bool = False
    position: FilePosition = FilePosition(0, 0)

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, name: str) -> "array[float]":
        """Return the values of a column. Raises KeyError if the file lacks it."""
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def numbers(self, what: str) -> list[int]:
        """Return the numbers of the cores ("cpu"), ranks ("rank") or GPUs ("gpu") that have columns."""
        found = {number_of(name, what) for name in self.columns}
        return sorted(number for number in found if number is not None)

    def values(self, name: str) -> list[float]:
        """Return the values of a column that are not missing; none if the file lacks the column."""
        return [value for value in self.columns.get(name, ()) if value == value]

    @property
    def interval_s(self) -> float | None:
        """The median time between two samples; None with fewer than two samples or without a clock."""
        if not self.has_clock:
            return None
        starts = set(self.sections)
        gaps = [
            after - before
            for number, (before, after) in enumerate(itertools.pairwise(self.time), 1)
            if number not in starts
        ]
        return statistics.median(gaps) if gaps else None

    @property
    def duration_s(self) -> float | None:
        """The time from the first sample to the last; None without a clock or without samples."""
        return max(self.time) - min(self.time) if self.has_clock and len(self.time) else None


class SampleBuilder:
    """Adds rows to `SampleTable`. Columns that a row lacks get a missing value."""

    def __init__(
        self, samples: SampleTable, file: IO[bytes], only: Callable[[str], bool], max_samples: int | None
    ):
        self.samples, self.file, self.only, self.max_samples = samples, file, only, max_samples

    @property
    def is_full(self) -> bool:
        return self.max_samples is not None and len(self.samples) >= self.max_samples

    def add(self, times: Sequence[float], columns: Mapping[str, "array[float]"]) -> None:
        """Add samples: their times, and their values by column."""
        samples = self.samples
        before = len(samples.time)
        samples.time.extend(times)
        for name, values in columns.items():
            if name not in samples.columns:
                samples.columns[name] = array("d", [NAN]) * before
            samples.columns[name].extend(values)
        for name, column in samples.columns.items():
            if name not in columns:
                column.extend(array("d", [NAN]) * len(times))

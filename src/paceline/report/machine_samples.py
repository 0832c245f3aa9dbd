"""Samples of the machines of a run in bounded memory, with their extremes and the energy that they used."""

import bisect
import contextlib
import math
from array import array
from itertools import accumulate
from pathlib import Path

from paceline.errors import RunError
from paceline.monitor.columns import MAIN_COLUMNS, kind_of
from paceline.monitor.samples import FilePosition, read_samples
from paceline.monitor.table import SampleTable
from paceline.report.curves import BucketColumn, keep_last_of_pairs
from paceline.units import several

MAX_SAMPLES = 2**12  # of a node; then neighbours are merged
MAX_COLUMNS = 128  # of a node; others are counted in `omitted`
MAX_NODES = 64
BLOCK_SAMPLES = 20_000  # that are read at once
MAX_GAP_S = 60.0  # between two samples; the energy of a longer gap is unknown
KINDS = (
    *MAIN_COLUMNS,
    "gpuN sm active",
    "gpuN clock sm",
    "gpuN pcie in",
    "gpuN pcie out",
    "gpuN nvlink in",
    "gpuN nvlink out",
)
TOTALS = ("memory total", "job memory limit", "gpuN memory total", "gpuN power limit")
COUNTERS = ("cpu energy", "gpuN energy")


class NodeSamples:
    """The samples of one node.

    times: seconds since the epoch, of the last sample of each bucket.
    energy_J: used until then, since the first sample."""

    def __init__(self, path: Path):
        self.path, self.node = path, path.stem
        self._position = FilePosition(0, 0)
        self._clear()

    def _clear(self) -> None:
        self.times, self.energy_J = array("d"), array("d")
        self.columns: dict[str, BucketColumn] = {}
        self.units: dict[str, str] = {}
        self.totals: dict[str, float] = {}  # the last value of each of TOTALS
        self.comments: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.omitted: set[str] = set()
        self.damaged = 0
        self.has_energy = False
        self._width, self._count = 1, 0  # samples per bucket, and in the last bucket
        self._energy = 0.0
        self._before: dict[str, float] = {}  # the last value of each counter, and the last time

    def refresh(self) -> None:
        """Read the samples appended since the last call. Raises RunError for an unreadable file."""
        while True:
            samples = read_samples(self.path, self._position, only=_is_wanted, max_samples=BLOCK_SAMPLES)
            if samples.restarted:  # another file replaced it
                self._clear()
            before = self._position if not samples.restarted else FilePosition(0, 0)
            self._position = samples.position
            self._add(samples)
            if samples.position.end <= before.end or not len(samples):
                return

    def _add(self, samples: SampleTable) -> None:
        self.node = samples.node or self.node
        self.comments |= samples.comments
        self.absent = dict(samples.absent) or self.absent
        self.damaged += samples.damaged
        self.notes |= dict.fromkeys(samples.notes)
        for name, values in samples.columns.items():
            if kind_of(name) in KINDS and name not in self.columns:
                if len(self.columns) == MAX_COLUMNS:
                    self.omitted.add(name)
                    continue
                self.columns[name] = column = BucketColumn()
                self.units[name] = samples.units.get(name, "")
                column.append_empty(len(self.times))
            elif kind_of(name) in TOTALS:
                finite = [value for value in values if math.isfinite(value)]
                self.totals |= {name: finite[-1]} if finite else {}
        starts = set(samples.sections)
        counters = {name: values for name, values in samples.columns.items() if _is_energy(name)}
        energy = []
        for at, time in enumerate(samples.time):
            self._add_energy(time, {name: values[at] for name, values in counters.items()}, at in starts)
            energy.append(self._energy)
        self._add_samples(samples, energy)

    def _add_energy(self, time: float, row: dict[str, float], is_first: bool) -> None:
        """Add the energy since the previous sample: of counters, or else power by time."""
        gap_s = time - self._before.get("time", math.inf)
        if not is_first and 0 < gap_s <= MAX_GAP_S:
            for name, value in row.items():
                before = self._before.get(name, math.nan)
                if kind_of(name) in COUNTERS:
                    if value >= before:
                        self._energy += value - before
                        self.has_energy = True
                elif f"{name.removesuffix('power')}energy" not in row and math.isfinite(value):
                    self._energy += value * gap_s
                    self.has_energy = True
        self._before = row | {"time": time}

    def _add_samples(self, samples: SampleTable, energy: list[float]) -> None:
        times = [*accumulate(samples.time, max, initial=self.times[-1] if self.times else -math.inf)][1:]
        begin = 0
        while begin < len(times):
            is_new = not self.times or self._count == self._width
            end = min(len(times), begin + self._width - (0 if is_new else self._count))
            if is_new:
                self.times.append(0.0)
                self.energy_J.append(0.0)
                self._count = 0
            self.times[-1], self.energy_J[-1] = times[end - 1], energy[end - 1]
            self._count += end - begin
            for name, column in self.columns.items():
                values = samples.columns[name][begin:end] if name in samples else (math.nan,)
                (column.append if is_new else column.merge_into_last)(values)
            begin = end
            if len(self.times) > MAX_SAMPLES:
                self._halve()

    def _halve(self) -> None:
        """Merge each two neighbouring buckets."""
        single = len(self.times) % 2
        keep_last_of_pairs(self.times, self.energy_J)
        for column in self.columns.values():
            column.halve()
        self._count = self._count if single else self._width + self._count
        self._width *= 2

    def find_energy_J(self, time: float) -> float:
        """Return the energy used until a time."""
        at = bisect.bisect_left(self.times, time)
        if not at or at == len(self.times):
            return 0.0 if not at else self.energy_J[-1]
        begin, end = self.times[at - 1], self.times[at]
        share = (time - begin) / (end - begin) if end > begin else 1.0
        return self.energy_J[at - 1] + share * (self.energy_J[at] - self.energy_J[at - 1])


def _is_energy(name: str) -> bool:
    return kind_of(name) in (*COUNTERS, "gpuN power")


def _is_wanted(name: str) -> bool:
    return name == "time" or kind_of(name) in (*KINDS, *TOTALS, *COUNTERS)


class MachineSamples:
    """The samples of all nodes of a run, read incrementally from a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.nodes: dict[str, NodeSamples] = {}  # by file name
        self.unreadable: dict[str, str] = {}  # why a file could not be read, by its name
        self.omitted = 0  # nodes beyond MAX_NODES

    def refresh(self) -> None:
        paths: list[Path] = []
        with contextlib.suppress(OSError):
            paths = sorted(self.folder.glob("*.csv"))
        self.omitted = max(0, len(paths) - MAX_NODES)
        for path in paths[:MAX_NODES]:
            samples = self.nodes.setdefault(path.name, NodeSamples(path))
            try:
                samples.refresh()
                self.unreadable.pop(path.name, None)
            except RunError as error:
                self.unreadable[path.name] = str(error)

    @property
    def has_energy(self) -> bool:
        return any(node.has_energy for node in self.nodes.values())

    def find_energy_J(self, time: float) -> float:
        """Return the energy that all nodes used until a time."""
        return sum(node.find_energy_J(time) for node in self.nodes.values())

    @property
    def problems(self) -> list[str]:
        found = list(self.unreadable.values())
        for node in self.nodes.values():
            found += [f"{node.node}: {note}" for note in node.notes]
            if node.damaged:
                found.append(f"skipped {several(node.damaged, 'damaged line')} in {node.path}")
            if node.omitted:
                found.append(f"{node.node}: only the first {MAX_COLUMNS} columns of samples are kept")
        if self.omitted:
            found.append(f"samples of the first {MAX_NODES} of {MAX_NODES + self.omitted} nodes are kept")
        return found

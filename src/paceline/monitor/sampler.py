"""Sampler: reads all sensors of a node at regular times, and appends the values to a file."""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.limits import affinity
from paceline.monitor.gpus.amd import AmdSensor
from paceline.monitor.gpus.nvidia_smi_writer import NvidiaSmiWriter
from paceline.monitor.gpus.nvml import NvmlSensor
from paceline.monitor.node import (
    CpuEnergySensor,
    CpuSensor,
    DiskSensor,
    FreeSpaceSensor,
    MemorySensor,
    NetworkSensor,
)
from paceline.monitor.processes import RankSensor
from paceline.monitor.sample_writer import SampleWriter
from paceline.monitor.sections import CLOCK
from paceline.monitor.sensor import AbsentSensorError, Sensor

Writer = SampleWriter | NvidiaSmiWriter
MAX_CLOCK_DIFFERENCE_S = 2.0  # what a file system may round or delay


class Sampler:
    """Reads all sensors of this node.

    ranks   the sensor of the ranks
    folder  the folder whose free space counts
    others  more sensors
    """

    def __init__(self, ranks: RankSensor, folder: Path, others: Sequence[Sensor] = ()):
        self.ranks = ranks
        self.absent: dict[str, str] = {}
        self.cpu = CpuSensor(affinity())
        self.gpus: NvmlSensor | None = None
        openers: Mapping[str, Callable[[], Sensor]] = {
            "disk": DiskSensor,
            "disk free": lambda: FreeSpaceSensor(folder),
            "network": NetworkSensor,
            "cpu energy": CpuEnergySensor,
        }
        self.sensors: list[Sensor] = [self.cpu, MemorySensor()]
        for name, opener in openers.items():
            if (sensor := self._open(name, opener)) is not None:
                self.sensors.append(sensor)
        self.sensors += [*others, ranks]
        self._open_gpus()
        self._reported: set[tuple[str, str]] = set()
        self._columns: list[str] | None = None

    def _open(self, name: str, opener: Callable[[], Sensor]) -> Sensor | None:
        try:
            return opener()
        except AbsentSensorError as error:
            self.absent[name] = str(error)
        return None

    def _open_gpus(self) -> None:
        reasons = []
        for opener in (lambda: NvmlSensor(self.ranks.all_pids), AmdSensor):
            try:
                sensor: Any = opener()
            except AbsentSensorError as error:
                reasons.append(str(error))
                continue
            self.sensors.append(sensor)
            if isinstance(sensor, NvmlSensor):
                self.gpus = sensor
            return
        self.absent["gpu"] = "; ".join(reasons)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order of the values."""
        return [name for sensor in self.sensors for name in sensor.columns]

    def search(self) -> None:
        """Find ranks that are missing, and the cores and GPUs that they may use."""
        if not self.ranks.search():
            return
        cores = self.ranks.cores()
        if cores and cores != set(self.cpu.cores):
            self.cpu.set_cores(cores)
        if self.gpus is not None:
            self.gpus.select(
                [read_environment(pid).get("CUDA_VISIBLE_DEVICES") for pid in self.ranks.pids.values()]
            )

    def read(self) -> list[float | None]:
        """Return the values of all columns now."""
        now = time.monotonic()
        return [value for sensor in self.sensors for value in sensor.read(now)]

    def describe(self, writer: Writer) -> None:
        """Write the comments and the columns that are new since the last call."""
        comments = [item for sensor in self.sensors for item in sensor.comments.items()]
        for absent in (self.absent, *(sensor.absent for sensor in self.sensors)):
            comments += [("absent", f"{name}: {why}") for name, why in absent.items()]
        writer.comment(item for item in comments if item not in self._reported)
        self._reported.update(comments)
        if (columns := self.columns) != self._columns:
            writer.set_columns(columns)
            self._columns = columns


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment of a process; empty if it may not be read."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(word).partition("=")[::2] for word in words if b"=" in word)
    return {}


def begin_section(sampler: Sampler, writer: Writer, every_s: float) -> None:
    """Write the header of a start."""
    comments = [("interval [s]", f"{every_s:g}")]
    ahead_s = writer.clock_ahead_s()
    if abs(ahead_s) > MAX_CLOCK_DIFFERENCE_S:
        comments.append((CLOCK, f"{ahead_s:.1f}"))
    writer.begin(platform.node(), comments)
    sampler.describe(writer)


def sample(
    sampler: Sampler,
    writer: Writer,
    every_s: float,
    is_over: Callable[[float], bool],
    observe: Callable[[float, Sequence[str], Sequence[float | None]], Any] | None = None,
) -> None:
    """Append a sample every `every_s` seconds until `is_over` returns True.

    is_over: waits for at most the given seconds
    observe: called with the time, the columns and the values of each sample
    """
    sampler.search()
    begin_section(sampler, writer, every_s)
    sampler.read()
    begin = time.monotonic()
    count = 0
    while True:
        # Regular times: a late sample does not delay those after it, and missed times are left out.
        count = max(count + 1, int((time.monotonic() - begin) / every_s))
        if is_over(max(0.0, begin + count * every_s - time.monotonic())):
            return
        sampler.search()
        values = sampler.read()
        sampler.describe(writer)
        at = time.time()
        writer.write(at, values)
        if observe is not None:
            observe(at, sampler.columns, values)

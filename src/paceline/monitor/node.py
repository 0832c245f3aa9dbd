"""Sensors of a node: processors, memory, swap, disks, network, energy of the processors."""

import contextlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.limits import core_ticks, find_memory_group, group_memory_limit, group_memory_used
from paceline.files import reason
from paceline.monitor.sensor import AbsentSensorError, RateMeter, Sensor
from paceline.units import format_ranges, several

POWERCAP, BLOCK, INTERFACES = Path("/sys/class/powercap"), Path("/sys/block"), Path("/sys/class/net")
MIB, MB = 2**20, 10**6
SLOW_EVERY = 10  # samples between two readings of values that change slowly


class CpuSensor(Sensor):
    """The share of time in which each core was busy.

    cores: the cores that count; `cpu` is the mean over them.
    """

    def __init__(self, cores: Collection[int]):
        super().__init__()
        self._before = core_ticks()
        self.set_cores(cores)

    def set_cores(self, cores: Collection[int]) -> None:
        """Change the cores that count. Those that the machine does not have are left out."""
        total = len(self._before)
        self.cores = sorted(core for core in cores if core in self._before)
        self.columns = ("cpu", *(f"cpu{core}" for core in self.cores), "load")
        self.comments = {"cpu": f"{len(self.cores)} of {several(total, 'core')}: {format_ranges(self.cores)}"}

    def read(self, now: float) -> Sequence[float | None]:
        before, after = self._before, core_ticks()
        self._before = after
        shares: list[float | None] = []
        for core in self.cores:
            busy = idle = 0
            if core in before and core in after:
                busy, idle = (now - then for now, then in zip(after[core], before[core], strict=True))
            shares.append(100 * max(0, busy) / (max(0, busy) + idle) if max(0, busy) + idle > 0 else None)
        known = [share for share in shares if share is not None]
        return [sum(known) / len(known) if known else None, *shares, os.getloadavg()[0]]


class MemorySensor(Sensor):
    """Memory and swap of the node, and the memory of the control group if that is limited."""

    def __init__(self) -> None:
        super().__init__()
        self._group = find_memory_group()
        self._swap = RateMeter()
        self.columns = (
            "memory used",
            "memory total",
            *(("job memory used", "job memory limit") if self._group else ()),
            "swap used",
            "swap in",
            "swap out",
        )

    def read(self, now: float) -> Sequence[float | None]:
        memory = psutil.virtual_memory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # psutil 7: no swap counters in a container
            swap = psutil.swap_memory()
        rates = self._swap.rates({"in": swap.sin, "out": swap.sout}, now)
        of_job: list[float | None] = []
        if self._group is not None:
            used, limit = group_memory_used(self._group), group_memory_limit(self._group)
            of_job = [size / MIB if size is not None else None for size in (used, limit)]
        return [
            (memory.total - memory.available) / MIB,
            memory.total / MIB,
            *of_job,
            swap.used / MIB,
            _total_mb(rates, "in"),
            _total_mb(rates, "out"),
        ]


class DiskSensor(Sensor):
    """What all disks read and write. Raises AbsentSensorError."""

    def __init__(self) -> None:
        super().__init__(("disk read", "disk write"))
        self._meter = RateMeter()
        try:
            names = psutil.disk_io_counters(perdisk=True)
        except (OSError, NotImplementedError, RuntimeError) as error:
            raise AbsentSensorError(reason(error)) from error
        if not names:
            raise AbsentSensorError("the system reports no disks")
        # Counters of partitions, and of devices on top of others, repeat those of the disks.
        self._disks = [name for name in names if (BLOCK / name / "device").exists()]
        self._disks = self._disks or [name for name in names if (BLOCK / name).exists()] or list(names)

    def read(self, now: float) -> Sequence[float | None]:
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False)
        return _total_rates(self._meter, counters, self._disks, ("read_bytes", "write_bytes"), now)


class FreeSpaceSensor(Sensor):
    """The free space of the file system of a folder. Raises AbsentSensorError."""

    def __init__(self, folder: Path):
        super().__init__(("disk free",))
        self._folder = folder
        self._count = 0
        self._free: float | None = None
        try:
            os.statvfs(folder)
        except OSError as error:
            raise AbsentSensorError(reason(error)) from error

    def read(self, now: float) -> Sequence[float | None]:
        if self._count % SLOW_EVERY == 0:
            self._free = None
            with contextlib.suppress(OSError):
                stats = os.statvfs(self._folder)
                self._free = stats.f_bavail * stats.f_frsize / MIB
        self._count += 1
        return [self._free]


class NetworkSensor(Sensor):
    """What all network interfaces except loopback receive and send. Raises AbsentSensorError."""

    def __init__(self) -> None:
        super().__init__(("network in", "network out"))
        self._meter = RateMeter()
        try:
            names = psutil.net_io_counters(pernic=True)
        except OSError as error:
            raise AbsentSensorError(reason(error)) from error
        # Counters of bonds, bridges and tunnels repeat those of the devices. A container has no devices.
        self._interfaces = [name for name in names if (INTERFACES / name / "device").exists()]
        self._interfaces = self._interfaces or [name for name in names if name != "lo"]
        if not self._interfaces:
            raise AbsentSensorError("the system has no network interface besides loopback")

    def read(self, now: float) -> Sequence[float | None]:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        return _total_rates(self._meter, counters, self._interfaces, ("bytes_recv", "bytes_sent"), now)


class CpuEnergySensor(Sensor):
    """The energy of all processors, as RAPL counts it. Raises AbsentSensorError."""

    def __init__(self, root: Path = POWERCAP):
        super().__init__(("cpu energy",))
        self._zones: list[tuple[Path, int]] = []  # counter of a processor, and the value at which it wraps
        for zone in sorted(root.glob("intel-rapl:*")):
            with contextlib.suppress(OSError, ValueError):
                if (zone / "name").read_text().startswith("package"):
                    self._zones.append((zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())))
        if not self._zones:
            raise AbsentSensorError(f"{root} has no counters of processors (RAPL)")
        try:
            self._before = [int(path.read_text()) for path, _ in self._zones]
        except (OSError, ValueError) as error:
            raise AbsentSensorError(f"{self._zones[0][0]} is not readable: {reason(error)}") from error
        self._total_uj = 0

    def read(self, now: float) -> Sequence[float | None]:
        try:
            counts = [int(path.read_text()) for path, _ in self._zones]
        except (OSError, ValueError):
            return [None]
        for count, before, (_, wrap) in zip(counts, self._before, self._zones, strict=True):
            self._total_uj += count - before if count >= before else count - before + wrap
        self._before = counts
        return [self._total_uj / 1e6]


def _total_rates(
    meter: RateMeter, counters: Mapping[str, Any], devices: Sequence[str], fields: Sequence[str], now: float
) -> list[float | None]:
    """Return the rate of each field of counters, in MB/s, as the sum over those devices that exist."""
    counts = {
        f"{field} {name}": float(getattr(counters[name], field))
        for name in devices
        if name in counters
        for field in fields
    }
    rates = meter.rates(counts, now)
    return [_total_mb(rates, f"{field} ") for field in fields]


def _total_mb(rates: Mapping[str, float | None], begin: str) -> float | None:
    """Return the sum of the rates whose names begin with a text, in MB/s."""
    known = [rate for name, rate in rates.items() if name.startswith(begin) and rate is not None]
    return sum(known) / MB if known else None

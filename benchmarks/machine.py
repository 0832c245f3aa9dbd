"""The machine of a benchmark, and the share of it that other programs use during a measurement."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MAX_OTHER_SHARE = 0.1  # measure again if other programs used more than this share of the machine
TRIES = 20


def description() -> str:
    """Return the processor, the number of cores and the Python version."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}"


def _busy_s() -> float:
    """Return the busy CPU seconds of all cores, including what a hypervisor took from them."""
    times = psutil.cpu_times()._asdict()
    return sum(
        seconds for name, seconds in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")
    )


@dataclass(frozen=True)
class LoadMeter:
    """Meter of the load by other programs; starts at its creation."""

    start: float = field(default_factory=time.perf_counter)
    busy_s: float = field(default_factory=_busy_s)

    def other_share(self, own_s: float) -> float:
        """Return the share of the machine that other programs used. `own_s`: CPU seconds of the benchmark."""
        return (_busy_s() - self.busy_s - own_s) / (
            (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        )

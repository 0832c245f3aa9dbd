"""The machine that a benchmark runs on, and how much of it other programs take meanwhile."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

OTHERS = (
    0.1  # what was measured while other programs took more than this share of the machine is measured again
)
TRIES = 20


def description() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"


def _busy_s() -> float:
    """CPU seconds that the machine has spent on anything, those taken by its host included."""
    times = psutil.cpu_times()._asdict()
    return sum(
        seconds for name, seconds in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")
    )


@dataclass(frozen=True)
class Gauge:
    """Begins to count when it is made."""

    began: float = field(default_factory=time.perf_counter)
    busy_s: float = field(default_factory=_busy_s)

    def others(self, own_s: float) -> float:
        """Share of the machine that others took, when the benchmark itself took so many CPU seconds."""
        return (_busy_s() - self.busy_s - own_s) / (
            (time.perf_counter() - self.began) * (os.cpu_count() or 1)
        )

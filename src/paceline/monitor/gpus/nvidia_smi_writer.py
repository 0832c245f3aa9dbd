"""Write samples in the CSV of `nvidia-smi --query-gpu=… --format=csv`, for programs that read it."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.files import append_whole, end_of_lines
from paceline.monitor.columns import number_of

# A field of nvidia-smi with its unit, and the column of a sample after "gpuN ".
FIELDS = (
    ("utilization.gpu", "%", "utilization"),
    ("utilization.memory", "%", "memory utilization"),
    ("memory.used", "MiB", "memory used"),
    ("memory.total", "MiB", "memory total"),
    ("power.draw", "W", "power"),
    ("enforced.power.limit", "W", "power limit"),
    ("temperature.gpu", "", "temperature"),
    ("clocks.current.sm", "MHz", "clock sm"),
    ("clocks.current.memory", "MHz", "clock memory"),
    ("clocks_throttle_reasons.active", "", "throttle"),
    ("pcie.link.gen.current", "", "pcie generation"),
    ("pcie.link.width.current", "", "pcie lanes"),
)
HEADER = ", ".join(
    ["timestamp", "index", "name", "uuid"]
    + [f"{name} [{unit}]" if unit else name for name, unit, _ in FIELDS]
)
MISSING = "[N/A]"


class NvidiaSmiWriter:
    """A file to which each sample appends a line for each GPU. It has the methods of `SampleWriter`."""

    def __init__(self, file: int, path: Path):
        self._file, self.path = file, path
        self._columns: Sequence[str] = ()
        self._names: dict[int, list[str]] = {}  # name and UUID by number of the GPU
        self.lost = 0
        end = end_of_lines(file)
        if end < os.fstat(file).st_size:
            os.ftruncate(file, end)
        self._head = f"{HEADER}\n" if not end else ""

    def begin(self, node: str, comments: Iterable[tuple[str, str]]) -> None:
        """Do nothing: the format has no comments."""

    def comment(self, comments: Iterable[tuple[str, str]]) -> None:
        """Keep the names of GPUs; the format has no other comments."""
        for topic, text in comments:
            number = number_of(topic, "gpu")
            if number is not None:
                name, _, uuid = text.partition(", ")
                self._names[number] = [name.replace(",", " "), uuid.partition(",")[0] or MISSING]

    def set_columns(self, names: Sequence[str]) -> None:
        """Set the columns of the values that follow."""
        self._columns = names

    def write(self, at: float, values: Sequence[float | None]) -> bool:
        """Append the lines of a sample, and return whether they were written."""
        row = dict(zip(self._columns, values, strict=True))
        numbers = sorted({number for name in row if (number := number_of(name, "gpu")) is not None})
        stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03}"
        lines = [
            ", ".join(
                [
                    stamp,
                    str(number),
                    *self._names.get(number, [MISSING, MISSING]),
                    *(_format(row.get(f"gpu{number} {column}"), unit, column) for _, unit, column in FIELDS),
                ]
            )
            for number in numbers
        ]
        if not append_whole(self._file, (self._head + "\n".join(lines) + "\n").encode()):
            self.lost += 1
            return False
        self._head = ""
        return True

    def clock_ahead_s(self) -> float:
        """Return 0: the format has local times only."""
        return 0.0

    def close(self) -> None:
        os.close(self._file)


def _format(value: float | None, unit: str, column: str) -> str:
    if value is None or value != value:
        return MISSING
    if column == "throttle":
        return f"0x{int(value):016X}"
    text = f"{value:.2f}" if unit == "W" else f"{value:.0f}"
    return f"{text} {unit}".rstrip()

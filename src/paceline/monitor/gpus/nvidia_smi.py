"""Files that people record with `nvidia-smi --query-gpu=… --format=csv -l 1`.

Each line is one GPU at one time. The lines of one time become one sample.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.monitor.columns import THROTTLE_REASONS, unit_of
from paceline.units import is_whole_number, without_controls

NAN = float("nan")
MAX_GPUS = 1024
# A field of nvidia-smi, and the column of a sample after "gpuN ".
FIELDS = {
    "utilization.gpu": "utilization",
    "utilization.memory": "memory utilization",
    "utilization.encoder": "encoder",
    "utilization.decoder": "decoder",
    "memory.used": "memory used",
    "memory.free": "memory free",
    "memory.total": "memory total",
    "power.draw": "power",
    "power.draw.average": "power",
    "power.draw.instant": "power",
    "power.limit": "power limit",
    "enforced.power.limit": "power limit",
    "clocks.sm": "clock sm",
    "clocks.current.sm": "clock sm",
    "clocks.max.sm": "clock sm limit",
    "clocks.gr": "clock sm",  # the clock of graphics is that of the multiprocessors
    "clocks.current.graphics": "clock sm",
    "clocks.max.gr": "clock sm limit",
    "clocks.max.graphics": "clock sm limit",
    "clocks.mem": "clock memory",
    "clocks.current.memory": "clock memory",
    "temperature.gpu": "temperature",
    "temperature.memory": "memory temperature",
    "clocks_throttle_reasons.active": "throttle",
    "clocks_event_reasons.active": "throttle",
    "ecc.errors.corrected.volatile.total": "ecc corrected",
    "ecc.errors.uncorrected.volatile.total": "ecc uncorrected",
    "pcie.link.gen.current": "pcie generation",
    "pcie.link.gen.gpucurrent": "pcie generation",
    "pcie.link.width.current": "pcie lanes",
    "fan.speed": "fan",
    "pstate": "state",
}
# Fields that are "Active" or "Not Active", and the reason of each.
THROTTLE_FIELDS = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "clocks set",
    "sw_power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "software thermal slowdown",
    "sync_boost": "sync boost",
}
NAMES_OF_GPU = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
OTHERS = ("timestamp", "name", "gpu_name", "count", "driver_version")
_THROTTLE = re.compile(r"clocks_(?:throttle|event)_reasons\.(\w+)")
_VALUE = re.compile(r"(-?\d{1,15}(?:\.\d{1,9})?)(?: ([A-Za-z%]+))?", re.ASCII)
_MISSING = re.compile(r"|\[.*\]|N/A|ERR!|Not Supported|Unknown Error|GPU is lost|-")
_TIMESTAMP = re.compile(r"(\d{4})/(\d\d)/(\d\d) (\d\d):(\d\d):(\d\d)(\.\d{1,6})?", re.ASCII)


def known_fields() -> list[str]:
    """Return the fields that have a column in samples."""
    return [*FIELDS, *(f"clocks_throttle_reasons.{name}" for name in THROTTLE_FIELDS)]


def parse_header(line: str) -> list[str] | None:
    """Return the fields of a header such as `index, utilization.gpu [%]`; None if none has a column."""
    fields = [cell.strip().partition(" [")[0] for cell in line.split(",")]
    return fields if any(_column(name) for name in fields) else None


def _column(name: str) -> str | None:
    match = _THROTTLE.fullmatch(name)
    return "throttle" if match and match[1] in THROTTLE_FIELDS else FIELDS.get(name)


@dataclass
class GpuLineParser:
    """Turns the lines of such a file into samples.

    fields  the fields of its header
    gpus    names of the GPUs seen so far, which number them if there is no index
    """

    fields: Sequence[str]
    gpus: list[str] = field(default_factory=list)
    num_lines: int = 0  # of a complete sample
    descriptions: dict[str, str] = field(default_factory=dict)  # "gpu0" -> "NVIDIA H100 80GB HBM3"

    def __post_init__(self) -> None:
        self.identity = next((name for name in NAMES_OF_GPU if name in self.fields), None)
        self.has_clock = "timestamp" in self.fields
        self._parsers: list[tuple[int, str, Callable[[str, str], float]]] = []
        for position, name in enumerate(self.fields):
            column = _column(name)
            if column:
                match = _THROTTLE.fullmatch(name)
                parse = _flag_parser(match[1]) if match and match[1] != "active" else _parse_value
                self._parsers.append((position, column, parse))

    @property
    def ignored(self) -> list[str]:
        """The fields of the header that have no column."""
        return [
            without_controls(name)
            for name in self.fields
            if not _column(name) and name not in (*NAMES_OF_GPU, *OTHERS)
        ]

    def parse(self, line: str) -> tuple[float, str | None, dict[str, float]]:
        """Return the time of a line (NaN if there is none), the name of its GPU, and its values by column.

        Raises ValueError for a damaged line.
        """
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(self.fields):
            raise ValueError(f"expected {len(self.fields)} values, got {len(cells)}")
        row = dict(zip(self.fields, cells, strict=True))
        at = parse_timestamp(row["timestamp"]) if self.has_clock else NAN
        values: dict[str, float] = {}
        for position, column, parse in self._parsers:
            value = parse(cells[position], "MiB" if column == "memory free" else unit_of(f"gpu0 {column}"))
            before = values.get(column, NAN)
            if column == "throttle" and value == value and before == before:
                value = float(int(value) | int(before))
            values[column] = value if value == value else before
        free = values.pop("memory free", NAN)
        if "memory used" not in values and free == free and "memory total" in values:
            values["memory used"] = values["memory total"] - free
        name = row[self.identity] if self.identity else None
        if self.identity == "index" and not _is_index(name):
            raise ValueError(f"the index of a GPU must be a number, got {name!r}")
        if self.identity is None and is_whole_number(row.get("count", "")):
            self.num_lines = max(self.num_lines, min(int(row["count"]), MAX_GPUS))
        label = row.get("name") or row.get("gpu_name")
        number = self.number(name, 0) if name is not None else None
        if label and number is not None:
            self.descriptions.setdefault(f"gpu{number}", without_controls(label))
        return at, name, values

    def number(self, name: str | None, position: int) -> int:
        """Return the number of a GPU: its index, or else the order in which it appeared."""
        if name is None:
            return position
        if self.identity == "index":
            return int(name)
        if name not in self.gpus:
            if len(self.gpus) == MAX_GPUS:
                raise ValueError("too many GPUs")
            self.gpus.append(name)
        return self.gpus.index(name)

    def group(
        self, lines: Sequence[tuple[float, str | None, dict[str, float]]]
    ) -> Iterator[list[tuple[float, str | None, dict[str, float]]]]:
        """Yield the lines of each sample. The last sample may be incomplete."""
        if self.identity is None and not self.num_lines:
            self.num_lines = _lines_per_sample([line[0] for line in lines[:4096]]) if self.has_clock else 1
        sample: list[tuple[float, str | None, dict[str, float]]] = []
        names: set[str | None] = set()
        for line in lines:
            is_full = line[1] in names if self.identity else len(sample) == self.num_lines
            if sample and is_full:
                yield sample
                sample, names = [], set()
            sample.append(line)
            names.add(line[1])
        if sample:
            yield sample


def _is_index(name: str | None) -> bool:
    return name is not None and is_whole_number(name) and int(name) < MAX_GPUS


def _lines_per_sample(times: Sequence[float]) -> int:
    """Return the number of GPUs: nvidia-smi writes their lines within milliseconds, and then waits."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    if not gaps or max(gaps) <= 0:
        return max(1, len(times))
    pauses = [number for number, gap in enumerate(gaps) if gap > max(gaps) / 2]
    return pauses[0] + 1


def parse_timestamp(text: str) -> float:
    """Return the seconds since the epoch of `2024/05/01 12:34:56.789`, a local time. Raises ValueError."""
    match = _TIMESTAMP.fullmatch(text)
    if not match:
        raise ValueError(f"not a timestamp of nvidia-smi: {text!r}")
    year, month, day, hour, minute, second = (int(match[number]) for number in range(1, 7))
    try:
        whole = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    except OverflowError as error:
        raise ValueError(str(error)) from error
    return whole + float(match[7] or 0)


def _parse_value(text: str, unit: str) -> float:
    match = _VALUE.fullmatch(text)
    if match and (match[2] is None or match[2] == unit):
        return float(match[1])
    if _MISSING.fullmatch(text):
        return NAN
    if text.startswith("0x") and len(text) <= 18:
        return float(int(text, 16))
    if re.fullmatch(r"P\d{1,2}", text, re.ASCII):
        return float(text[1:])
    raise ValueError(f"not a number in {unit}: {text!r}")


def _flag_parser(name: str) -> Callable[[str, str], float]:
    bit = float(THROTTLE_REASONS[THROTTLE_FIELDS[name]])

    def parse(text: str, unit: str) -> float:
        if text in ("Active", "Not Active"):
            return bit if text == "Active" else 0.0
        if _MISSING.fullmatch(text):
            return NAN
        raise ValueError(f"expected Active or Not Active, got {text!r}")

    return parse

"""AMD's GPUs, from the files of the driver amdgpu: those that rocm-smi reads, without starting it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.monitor.sensor import AbsentSensorError, Sensor

DRM = Path("/sys/class/drm")
AMD = "0x1002"
MIB = 2**20
# Columns, with the files that may contain each, and the factor to its unit.
FILES = {
    "utilization": (("gpu_busy_percent",), 1.0),
    "memory utilization": (("mem_busy_percent",), 1.0),
    "memory used": (("mem_info_vram_used",), 1 / MIB),
    "memory total": (("mem_info_vram_total",), 1 / MIB),
    "power": (("hwmon/*/power1_average", "hwmon/*/power1_input"), 1e-6),
    "power limit": (("hwmon/*/power1_cap",), 1e-6),
    "energy": (("hwmon/*/energy1_input",), 1e-6),
    "clock sm": (("hwmon/*/freq1_input",), 1e-6),
    "clock memory": (("hwmon/*/freq2_input",), 1e-6),
    "temperature": (("hwmon/*/temp1_input",), 1e-3),
    "memory temperature": (("hwmon/*/temp3_input",), 1e-3),
}


@dataclass
class AmdDevice:
    """A GPU, and the files that can be read for it, by column."""

    number: int
    files: dict[str, tuple[Path, float]] = field(default_factory=dict)


class AmdSensor(Sensor):
    """AMD's GPUs. Raises AbsentSensorError if there are none."""

    def __init__(self, root: Path = DRM):
        super().__init__()
        self.devices: list[AmdDevice] = []
        for folder in sorted(root.glob("card*/device"), key=lambda path: (len(path.parent.name), path)):
            if "-" not in folder.parent.name and _read_text(folder / "vendor") == AMD:
                self._add(folder)
        if not self.devices:
            raise AbsentSensorError("this machine has no AMD GPU")
        self.columns = [f"gpu{device.number} {name}" for device in self.devices for name in device.files]

    def _add(self, folder: Path) -> None:
        device = AmdDevice(len(self.devices))
        for column, (patterns, factor) in FILES.items():
            paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
            readable = [path for path in paths if _read_number(path) is not None]
            if readable:
                device.files[column] = readable[0], factor
            else:
                why = f"{paths[0]} is not readable" if paths else f"{folder} has no {patterns[0]}"
                self.absent[f"gpu{device.number} {column}"] = why
        name = _read_text(folder / "product_name") or "AMD GPU"
        self.comments[f"gpu{device.number}"] = f"{name}, {folder.resolve().name}"
        self.devices.append(device)

    def read(self, now: float) -> Sequence[float | None]:
        row: list[float | None] = []
        for device in self.devices:
            for path, factor in device.files.values():
                number = _read_number(path)
                row.append(number * factor if number is not None else None)
        return row


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _read_number(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return float(path.read_text())
    return None

"""GPUs, as nvidia-smi and rocm-smi list them."""

import csv
import json
import re
from typing import Any

from paceline.cluster.machine import Accelerator
from paceline.cluster.published import find_published_name
from paceline.cluster.run_tool import run

QUERY = "index,name,memory.total,driver_version,power.limit,pci.bus_id"


def list_nvidia() -> tuple[Accelerator, ...]:
    """Return NVIDIA's GPUs of this machine. Raises ClusterError if nvidia-smi fails."""
    return parse_nvidia(run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"))


def list_amd() -> tuple[Accelerator, ...]:
    """Return AMD's GPUs of this machine. Raises ClusterError if rocm-smi fails."""
    return parse_amd(
        run(
            "rocm-smi",
            "--showproductname",
            "--showmeminfo",
            "vram",
            "--showbus",
            "--showmaxpower",
            "--showdriverversion",
            "--json",
        )
    )


def parse_nvidia(text: str) -> tuple[Accelerator, ...]:
    """Return the GPUs in CSV with a header and units, as in `memory.total [MiB]` and `81920 MiB`."""
    lines = [[cell.strip() for cell in line] for line in csv.reader(text.splitlines())]
    if not lines or "index" not in lines[0]:
        return ()
    heads = [head.partition(" ")[0] for head in lines[0]]
    return tuple(
        _nvidia(dict(zip(heads, line, strict=True))) for line in lines[1:] if len(line) == len(heads)
    )


def _nvidia(row: dict[str, str]) -> Accelerator:
    memory, power = _number(row.get("memory.total")), _number(row.get("power.limit"))
    return Accelerator(
        index=int(row["index"]),
        name=row["name"],
        kind="cuda",
        memory_bytes=int(memory * 2**20) if memory else None,
        driver=row.get("driver_version"),
        power_W=power,
        bus=row.get("pci.bus_id"),
        sheet=find_published_name(row["name"]),
    )


def parse_amd(text: str) -> tuple[Accelerator, ...]:
    """Return the GPUs in JSON with `card0`, `card1` … The case of keys differs between versions of ROCm."""
    start = text.find("{")  # warnings precede it
    try:
        tree = json.loads(text[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        return ()
    driver = _value(tree.get("system", {}), "driver version")
    cards = sorted(
        (int(match[1]), row) for key, row in tree.items() if (match := re.fullmatch(r"card(\d+)", key))
    )
    return tuple(_amd(index, row, driver) for index, row in cards)


def _amd(index: int, row: dict[str, Any], driver: str | None) -> Accelerator:
    name = _value(row, "card series") or _value(row, "device name") or _value(row, "card model") or "AMD GPU"
    memory, power = (
        _number(_value(row, "vram total memory (b)")),
        _number(_value(row, "max graphics package power (w)")),
    )
    return Accelerator(
        index=index,
        name=name,
        kind="rocm",
        memory_bytes=int(memory) if memory else None,
        driver=driver,
        power_W=power,
        bus=_value(row, "pci bus"),
        sheet=find_published_name(name),
    )


def _value(row: dict[str, Any], key: str) -> str | None:
    text = next((str(value) for name, value in row.items() if name.lower() == key), None)
    return None if text in (None, "", "N/A") else text


def _number(text: str | None) -> float | None:
    """Return the number at the start of a text: 81920 for `81920 MiB`, None for `[N/A]`."""
    match = re.match(r"[\d.]+", text or "")
    return float(match[0]) if match else None

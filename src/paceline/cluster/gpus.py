"""GPUs, as nvidia-smi and rocm-smi list them."""

import csv
import json
import re
from typing import Any

from paceline.cluster.machine import Accelerator, MigInstance
from paceline.cluster.published import find_published_name
from paceline.cluster.run_tool import run
from paceline.errors import ClusterError

QUERY = "index,name,memory.total,driver_version,power.limit,pci.bus_id"
MORE = "uuid,compute_mode,mig.mode.current,clocks.max.sm,clocks.max.memory"  # drivers before 450 lack some


def list_nvidia() -> tuple[Accelerator, ...]:
    """Return NVIDIA's GPUs of this machine. Raises ClusterError if nvidia-smi fails."""
    try:
        text = run("nvidia-smi", f"--query-gpu={QUERY},{MORE}", "--format=csv")
    except ClusterError:  # an old driver refuses fields that it does not know
        text = run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
    found = parse_nvidia(text)
    if not any(row.mig is not None for row in found):
        return found
    instances = parse_mig(run("nvidia-smi", "-L"))
    return tuple(
        row.model_copy(update={"mig": instances.get(row.index, ())}) if row.mig is not None else row
        for row in found
    )


def parse_mig(text: str) -> dict[int, tuple[MigInstance, ...]]:
    """Return the instances of each GPU by its index, as `nvidia-smi -L` lists them below the GPU."""
    instances: dict[int, tuple[MigInstance, ...]] = {}
    index = None
    for line in text.splitlines():
        if (match := re.match(r"GPU (\d+):", line)) is not None:
            index = int(match[1])
        elif index is not None and (
            match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)\s]+)\)", line)
        ):
            instance = MigInstance(profile=match[1], uuid=match[2])
            instances[index] = (*instances.get(index, ()), instance)
    return instances


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
        compute_mode=_known(row.get("compute_mode")),
        sm_MHz=_number(row.get("clocks.max.sm")),
        memory_MHz=_number(row.get("clocks.max.memory")),
        uuid=_known(row.get("uuid")),
        mig=() if row.get("mig.mode.current") == "Enabled" else None,
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


def _known(text: str | None) -> str | None:
    """Return a value of nvidia-smi, or None for `[N/A]`."""
    return None if not text or text.startswith("[") else text


def _number(text: str | None) -> float | None:
    """Return the number at the start of a text: 81920 for `81920 MiB`, None for `[N/A]`."""
    match = re.match(r"[\d.]+", text or "")
    return float(match[0]) if match else None

"""GPUs, as nvidia-smi and rocm-smi list them."""

import json
import re
from typing import Any

from paceline.cluster.machine import Accelerator, MigInstance
from paceline.cluster.published import find_published_name
from paceline.cluster.run_tool import run
from paceline.errors import ClusterError
from paceline.units import without_controls

QUERY = "index,name,memory.total,driver_version,power.limit,pci.bus_id"
MORE = "uuid,compute_mode,mig.mode.current,clocks.max.sm,clocks.max.memory"  # drivers before 450 lack some

UNKNOWN = re.compile(r"n/a|err!|none|unknown( error)?|not supported|not available", re.I)


def list_nvidia() -> tuple[Accelerator, ...]:
    """Return NVIDIA's GPUs of this machine. Raises ClusterError if nvidia-smi fails."""
    try:
        text = run("nvidia-smi", f"--query-gpu={QUERY},{MORE}", "--format=csv")
    except ClusterError as error:
        if "not a valid field" not in str(error):
            raise
        text = run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")  # for an old driver
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
    """Return AMD's GPUs of this machine. Raises ClusterError if rocm-smi fails, or prints something else."""
    text = run(
        "rocm-smi",
        "--showproductname",
        "--showmeminfo",
        "vram",
        "--showbus",
        "--showmaxpower",
        "--showdriverversion",
        "--json",
    )
    found = parse_amd(text)
    if not found and re.search(r"\bcard\d", text):
        raise ClusterError("the output of rocm-smi cannot be read: it is not JSON with a table for each card")
    return found


def parse_nvidia(text: str) -> tuple[Accelerator, ...]:
    """Return the GPUs in CSV with a header and units, as in `memory.total [MiB]` and `81920 MiB`.

    Messages, for example about a GPU that is lost, may stand between the lines. Raises ClusterError if there
    are only messages below the header.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    at = next((at for at, line in enumerate(lines) if line[0] == "index"), None)
    if at is None:
        return ()
    heads, rows = [head.partition(" ")[0] for head in lines[at]], lines[at + 1 :]
    found = [
        dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads) and row[0].isdecimal()
    ]
    if rows and not found:
        raise ClusterError(f"nvidia-smi lists no GPU: {without_controls(', '.join(rows[-1])[:300])}")
    return tuple(map(_nvidia, found))


def _nvidia(row: dict[str, str]) -> Accelerator:
    memory = _number(row.get("memory.total"), "MiB")
    return Accelerator(
        index=int(row["index"]),
        name=_known(row.get("name")) or "NVIDIA GPU",
        kind="cuda",
        memory_bytes=int(memory * 2**20) if memory else None,
        driver=_known(row.get("driver_version")),
        power_W=_number(row.get("power.limit"), "W"),
        compute_mode=_known(row.get("compute_mode")),
        sm_MHz=_number(row.get("clocks.max.sm"), "MHz"),
        memory_MHz=_number(row.get("clocks.max.memory"), "MHz"),
        uuid=_known(row.get("uuid")),
        mig=() if row.get("mig.mode.current") == "Enabled" else None,
        bus=_known(row.get("pci.bus_id")),
        sheet=find_published_name(row.get("name", "")),
    )


def parse_amd(text: str) -> tuple[Accelerator, ...]:
    """Return the GPUs in JSON with `card0`, `card1` … The case of keys differs between versions of ROCm."""
    tree = _find_object(text)
    driver = _value(tree.get("system"), "driver version")
    cards = sorted(
        (int(match[1]), row)
        for key, row in tree.items()
        if (match := re.fullmatch(r"card(\d{1,6})", key, re.ASCII)) and isinstance(row, dict)
    )
    return tuple(_amd(index, row, driver) for index, row in cards)


def _find_object(text: str) -> dict[str, Any]:
    """Return the first JSON object of a text, or an empty one. Warnings may precede and follow it."""
    start = text.find("{")
    try:
        tree = json.JSONDecoder().raw_decode(text, start)[0] if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _amd(index: int, row: dict[str, Any], driver: str | None) -> Accelerator:
    name = _value(row, "card series") or _value(row, "device name") or _value(row, "card model") or "AMD GPU"
    memory = _number(_value(row, "vram total memory (b)"))
    # the second die of a module reports a limit of 0: the module has one limit
    power = _number(_value(row, "max graphics package power (w)"), "W")
    return Accelerator(
        index=index,
        name=name,
        kind="rocm",
        memory_bytes=int(memory) if memory else None,
        driver=driver,
        power_W=power or None,
        bus=_value(row, "pci bus"),
        sheet=find_published_name(name),
    )


def _value(row: Any, key: str) -> str | None:
    if not isinstance(row, dict):
        return None
    return _known(next((str(value) for name, value in row.items() if name.lower() == key), None))


def _known(text: str | None) -> str | None:
    """Return a value of a tool, or None for `[N/A]`, `N/A`, `[Unknown Error]`, `ERR!` and the like."""
    is_unknown = not text or text.startswith("[") or UNKNOWN.fullmatch(text) is not None
    return None if is_unknown or text is None else without_controls(text)


def _number(text: str | None, unit: str = "") -> float | None:
    """Return the number of a text such as `81920 MiB`, None for other text and another unit."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(?: (\S+))?", text or "", re.ASCII)
    return float(match[1]) if match is not None and match[2] in (None, unit) else None

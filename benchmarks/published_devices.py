"""Devices of published measurements that a row names, but does not describe."""

import re
from collections import defaultdict
from collections.abc import Mapping
from math import log

from paceline.cluster.published import PublishedRow, sheets
from published_cells import find_number

PCIE_GBps = 32.0  # within a node, if nothing better is published
NETWORK_GBps = ((3000.0, 50.0), (1000.0, 25.0), (0.0, 12.5))  # by the memory bandwidth of the device


def strip_maker(gpu_type: str) -> str:
    """Return the name of a device in capital letters, without its maker and product line."""
    return re.sub(
        r"^((NVIDIA|AMD|GOOGLE|AWS|TESLA|GEFORCE|INSTINCT|HGX|DGX|8X)[ _-]+)+", "", gpu_type.upper()
    )


def is_recent(gpu_type: str) -> bool:
    """Return whether trainings on a device use the frameworks of 2023 and later."""
    return not strip_maker(gpu_type).startswith(("A", "V", "P", "T4", "RTX 3"))


def find_sheet(row: Mapping[str, str]) -> PublishedRow | None:
    """Return the published device that a row names: the longest name, and then the closest memory."""
    flat = _flatten(row["gpu_type"])
    memory = find_number(row["gpu_mem_GB"]) or 80.0
    found: list[tuple[int, float, str]] = []
    for name, sheet in sheets().items():
        for part in {_flatten(name), _flatten(name.split("-")[0])}:
            if part in flat:
                found.append((len(part), -abs(sheet.memory_GB - memory), name))
    return sheets()[max(found)[2]] if found else None


def with_published_device(row: Mapping[str, str]) -> Mapping[str, str]:
    """Return a row whose empty cells of the device have published numbers, where they are known."""
    if row["gpu_mem_GB"] and row["peak_TFLOPs_bf16"]:
        return row
    sheet = find_sheet(row)
    if sheet is None:
        return row
    peak = sheet.chip.dense.get("bf16", sheet.chip.dense.get("fp16", ""))
    known = {"gpu_mem_GB": f"{sheet.memory_GB:g}", "peak_TFLOPs_bf16": f"{peak}"}
    return defaultdict(str, {**row, **{key: row[key] or value for key, value in known.items()}})


def find_rates(row: Mapping[str, str]) -> tuple[float, float, float] | None:
    """Return GB/s of a published device: of its memory, within a node, and between usual nodes.

    An unknown device whose peak a row gives is as the most similar published one.
    """
    sheet = find_sheet(row) or _find_similar_sheet(row)
    if sheet is None:
        return None
    across = next(rate for least, rate in NETWORK_GBps if sheet.memory_GBps >= least)
    return sheet.memory_GBps, sheet.link_GBps or PCIE_GBps, across


def _find_similar_sheet(row: Mapping[str, str]) -> PublishedRow | None:
    """Return the published device whose peak and memory are closest to those that a row gives."""
    peak, memory = find_number(row["peak_TFLOPs_bf16"]), find_number(row["gpu_mem_GB"])
    if peak is None or memory is None:
        return None

    def distance(sheet: PublishedRow) -> float:
        own = sheet.chip.dense.get("bf16", sheet.chip.dense.get("fp16", 0.0)) or 1.0
        return abs(log(own / peak)) + abs(log(sheet.memory_GB / memory))

    return min(sheets().values(), key=distance)


def _flatten(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

"""What benches measured, as facts of a Cluster."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.bench.collectives.alpha_beta import least, links
from paceline.bench.result import Result
from paceline.cluster.facts import Cluster, Device, Disk, Engine, Fact, Overlap, Pace, Rate

QUARTILES = 1.349  # standard deviations between those of a normal distribution
LEAST_S = 1e-5  # that an engine takes
RATES = ("matmul", "matmul 2:4", "attention", "attention backward")
DISK = {
    "large write": "write_Bps",
    "read": "read_Bps",
    "small write": "sync_writes_per_s",
    "random read": "random_reads_per_s",
    "create": "creates_per_s",
    "open": "opens_per_s",
    "stat": "stats_per_s",
    "delete": "deletes_per_s",
    "checkpoint": "checkpoint_Bps",
}


def updated(cluster: Cluster, results: Iterable[Result]) -> Cluster:
    """The same with what was measured in the place of what was known before. Calibrations are of predictions from that: they go."""
    results = list(results)
    if {result.kind for result in results} & {"collectives", "compute", "overlap"}:
        cluster = cluster.model_copy(update={"calibrations": ()})
    for result in results:
        if result.kind == "collectives":
            cluster = cluster.updated(links=links(result.summary))
        if result.kind == "compute":
            cluster = cluster.updated(rates=rates(result)).model_copy(
                update={"device": _with_memory(cluster.device, result)}
            )
        if result.kind == "host":
            cluster = cluster.updated(paces=paces(result), engines=engines(result))
        if result.kind == "overlap":
            cluster = cluster.updated(overlaps=overlaps(result)).model_copy(
                update={"device": _with_copies(cluster.device, result)}
            )
        if result.kind == "storage":
            cluster = cluster.updated(disks=disks(result))
    return cluster


def rates(result: Result) -> list[Rate]:
    """Of attention, with the quickest kernel."""
    found: dict[Any, Any] = {}
    for row in result.rows:
        key = (row["operation"], row["dtype"], row["shape"])
        if row["operation"] in RATES and (key not in found or found[key]["flops"] < row["flops"]):
            found[key] = row
    return [
        Rate(
            operation=operation,
            dtype=dtype,
            shape=tuple(map(int, shape.split("×"))),
            flops=_fact(result, row, "flops", row.get("kernel")),
        )
        for (operation, dtype, shape), row in found.items()
    ]


def paces(result: Result) -> list[Pace]:
    """The least times, since whatever else goes on makes threads wait for one another."""
    found: dict[tuple[Any, Any], dict[float, float]] = {}
    for row in result.rows:
        if "operation" in row:
            found.setdefault((row["operation"], row["threads"]), {})[float(row["size"] or 0)] = float(
                row["min_s"] or 0
            )
    return [
        Pace(
            operation=operation,
            threads=threads,
            sizes=tuple(sorted(table)),
            seconds=tuple(float(f"{table[size]:.4g}") for size in sorted(table)),
            source="measured",
            note=f"paceline bench, {result.when}",
        )
        for (operation, threads), table in found.items()
    ]


def engines(result: Result) -> list[Engine]:
    """The plane that is nearest to what was measured over units and tensors, in relative terms, no part of it below 0."""
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for row in result.rows:
        if "engine" in row:
            measured = (
                float(row["units"] or 0),
                float(row.get("tensors") or 0),
                max(LEAST_S, float(row["median_s"] or 0)),
            )
            found.setdefault((str(row["engine"]), int(row["ranks"] or 1)), []).append(measured)

    def fact(value: float) -> Fact:
        return Fact(value=float(f"{value:.4g}"), source="measured", note=f"paceline bench, {result.when}")

    rows = []
    for (name, ranks), all_ in found.items():
        units, tensors, seconds = np.asarray(all_).T
        step_s, unit_s, tensor_s = map(
            fact, least(np.stack([np.ones(len(seconds)), units, tensors], axis=1) / seconds[:, None])[0]
        )
        rows.append(Engine(name=name, ranks=ranks, step_s=step_s, unit_s=unit_s, tensor_s=tensor_s))
    return rows


def overlaps(result: Result) -> list[Overlap]:
    """Of what was sent the largest; of copies, those of pinned memory on a stream of their own. What is in the way hides nothing."""
    found: dict[tuple[str, Any], Any] = {}
    for row in result.rows:
        if row.get("memory") != "pageable" and row.get("streams") != 1:
            found[str(row["operation"]), row.get("backend")] = row
    return [
        Overlap(
            operation=operation,
            backend=backend,
            hidden=_fact(result, row | {"hidden": min(1.0, max(0.0, row["hidden"]))}, "hidden"),
        )
        for (operation, backend), row in found.items()
    ]


def disks(result: Result) -> list[Disk]:
    """Without what a remark casts doubt on, as where a page cache could not be dropped."""
    found: dict[str, dict[str, Any]] = {}
    for row in result.rows:
        disk = found.setdefault(
            str(row["directory"]), {"path": row["directory"], "filesystem": row["filesystem"]}
        )
        rate = "Bps" if "Bps" in row else "per_s"
        if row["test"] in DISK and row.get(rate) and not row.get("note"):
            disk[DISK[str(row["test"])]] = _fact(result, row, rate)
    return [Disk(**disk) for disk in found.values()]


def _with_memory(device: Device, result: Result) -> Device:
    found = [row for row in result.rows if row["operation"] in ("copy", "triad")]
    best = max(found, key=lambda row: float(row["Bps"] or 0), default=None)
    return (
        device.model_copy(update={"memory_Bps": _fact(result, best, "Bps", best["operation"])})
        if best is not None
        else device
    )


def _with_copies(device: Device, result: Result) -> Device:
    update: dict[str, Any] = {}
    for field, operation in (("to_device_Bps", "copy to device"), ("to_host_Bps", "copy to host")):
        found = {
            row["memory"]: _fact(result, row, "Bps") for row in result.rows if row["operation"] == operation
        }
        update |= {field: found} if found else {}
    return device.model_copy(update=update)


def _fact(result: Result, row: Any, name: str, more: object = None) -> Fact:
    note = ", ".join(["paceline bench", result.when, *([str(more)] if more else [])])
    spread = row.get("spread")
    return Fact(
        value=row[name],
        source="measured",
        spread=round(float(spread) / QUARTILES, 4)
        if isinstance(spread, (int, float)) and row.get("n", 0) != 1
        else None,
        note=note,
    )

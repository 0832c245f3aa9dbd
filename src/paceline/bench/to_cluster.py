"""Convert bench results into facts of a Cluster."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.bench.collectives.alpha_beta import links_from_fits, nonnegative_least_squares
from paceline.bench.result import Result
from paceline.cluster.facts import Cluster, Device, Disk, Engine, Fact, Overlap, Pace, Rate
from paceline.plan.cost_model.op_times import STEP

IQR_SIGMAS = 1.349  # interquartile range of a normal distribution, in standard deviations
MIN_ENGINE_S = 1e-5
RATE_OPERATIONS = ("matmul", "matmul 2:4", "attention", "attention backward")
DISK_FIELDS = {
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


def update_cluster(cluster: Cluster, results: Iterable[Result]) -> Cluster:
    """Return the cluster with measured facts in place of earlier ones.

    Calibrations corrected predictions from the earlier facts, so they are dropped.
    """
    results = list(results)
    if {result.kind for result in results} & {"collectives", "compute", "host", "overlap"}:
        cluster = cluster.model_copy(update={"calibrations": ()})
    for result in results:
        if result.kind == "collectives":
            cluster = cluster.updated(links=links_from_fits(result.summary))
        if result.kind == "compute":
            cluster = cluster.updated(rates=extract_rates(result)).model_copy(
                update={"device": _with_memory(cluster.device, result)}
            )
        if result.kind == "host":
            cluster = cluster.updated(paces=extract_paces(result), engines=extract_engines(result))
        if result.kind == "overlap":
            cluster = cluster.updated(overlaps=extract_overlaps(result)).model_copy(
                update={"device": _with_copies(cluster.device, result)}
            )
        if result.kind == "storage":
            cluster = cluster.updated(disks=extract_disks(result))
    return cluster


def extract_rates(result: Result) -> list[Rate]:
    """Return the rates of products and attention; of attention, with the fastest kernel."""
    fastest: dict[Any, Any] = {}
    for row in result.rows:
        key = (row["operation"], row["dtype"], row["shape"])
        if row["operation"] in RATE_OPERATIONS and (
            key not in fastest or fastest[key]["flops"] < row["flops"]
        ):
            fastest[key] = row
    return [
        Rate(
            operation=operation,
            dtype=dtype,
            shape=tuple(map(int, shape.split("×"))),
            flops=_fact(result, row, "flops", row.get("kernel")),
        )
        for (operation, dtype, shape), row in fastest.items()
    ]


def extract_paces(result: Result) -> list[Pace]:
    """Return the minimum time of each operation: other programs make threads wait for each other.

    Of a whole step, the median, since trainings take the median time.
    """
    tables: dict[tuple[Any, Any], dict[float, float]] = {}
    for row in result.rows:
        if "operation" in row:
            tables.setdefault((row["operation"], row["threads"]), {})[float(row["size"] or 0)] = float(
                row["median_s" if row["operation"] == STEP else "min_s"] or 0
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
        for (operation, threads), table in tables.items()
    ]


def extract_engines(result: Result) -> list[Engine]:
    """Return the overhead of each engine: a plane over units and tensors, fitted by relative least squares.

    No coefficient is below 0.
    """
    points: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for row in result.rows:
        if "engine" in row:
            measured = (
                float(row["units"] or 0),
                float(row.get("tensors") or 0),
                max(MIN_ENGINE_S, float(row["median_s"] or 0)),
            )
            points.setdefault((str(row["engine"]), int(row["ranks"] or 1)), []).append(measured)

    def fact(value: float) -> Fact:
        return Fact(value=float(f"{value:.4g}"), source="measured", note=f"paceline bench, {result.when}")

    rows = []
    for (name, ranks), measurements in points.items():
        units, tensors, seconds = np.asarray(measurements).T
        terms = np.stack([np.ones(len(seconds)), units, tensors], axis=1) / seconds[:, None]
        step_s, unit_s, tensor_s = map(fact, nonnegative_least_squares(terms)[0])
        rows.append(Engine(name=name, ranks=ranks, step_s=step_s, unit_s=unit_s, tensor_s=tensor_s))
    return rows


def extract_overlaps(result: Result) -> list[Overlap]:
    """Return the hidden share of each operation, between 0 and 1.

    Of collectives, the largest size counts; of copies, pinned memory on a separate stream.
    """
    chosen: dict[tuple[str, Any], Any] = {}
    for row in result.rows:
        if row.get("memory") != "pageable" and row.get("streams") != 1:
            chosen[str(row["operation"]), row.get("backend")] = row
    return [
        Overlap(
            operation=operation,
            backend=backend,
            hidden=_fact(result, row | {"hidden": min(1.0, max(0.0, row["hidden"]))}, "hidden"),
        )
        for (operation, backend), row in chosen.items()
    ]


def extract_disks(result: Result) -> list[Disk]:
    """Return the rates of each directory, without rows with a note (the page cache could not be dropped)."""
    fields: dict[str, dict[str, Any]] = {}
    for row in result.rows:
        disk = fields.setdefault(
            str(row["directory"]), {"path": row["directory"], "filesystem": row["filesystem"]}
        )
        rate = "Bps" if "Bps" in row else "per_s"
        if row["test"] in DISK_FIELDS and row.get(rate) and not row.get("note"):
            disk[DISK_FIELDS[str(row["test"])]] = _fact(result, row, rate)
    return [Disk(**disk) for disk in fields.values()]


def _with_memory(device: Device, result: Result) -> Device:
    rows = [row for row in result.rows if row["operation"] in ("copy", "triad")]
    best = max(rows, key=lambda row: float(row["Bps"] or 0), default=None)
    return (
        device.model_copy(update={"memory_Bps": _fact(result, best, "Bps", best["operation"])})
        if best is not None
        else device
    )


def _with_copies(device: Device, result: Result) -> Device:
    update: dict[str, Any] = {}
    for field, operation in (("to_device_Bps", "copy to device"), ("to_host_Bps", "copy to host")):
        rates = {
            row["memory"]: _fact(result, row, "Bps") for row in result.rows if row["operation"] == operation
        }
        update |= {field: rates} if rates else {}
    return device.model_copy(update=update)


def _fact(result: Result, row: Any, name: str, detail: object = None) -> Fact:
    note = ", ".join(["paceline bench", result.when, *([str(detail)] if detail else [])])
    spread = row.get("spread")
    return Fact(
        value=row[name],
        source="measured",
        spread=round(float(spread) / IQR_SIGMAS, 4)
        if isinstance(spread, (int, float)) and row.get("n", 0) != 1
        else None,
        note=note,
    )

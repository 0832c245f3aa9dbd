"""The rows of the table of levels, from the nearest cache to the network."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.hierarchy.memory import (
    LINK_BYTES,
    MAX_LINKS,
    holds_chain,
    list_levels,
    measure_copy_Bps,
    measure_latency_s,
)
from paceline.bench.result import Row
from paceline.cluster import file
from paceline.cluster.facts import Cluster, Fact, Link
from paceline.cluster.local_cluster import find_file
from paceline.cluster.machine import Interface
from paceline.cluster.network import list_interfaces, list_rdma, nominal_Bps
from paceline.cluster.published import find_published_name, sheets
from paceline.units import format_bytes

if TYPE_CHECKING:
    import torch

KEYS = ("level",)
SMALL_BYTES, LARGE_BYTES = 4, 2**22  # of messages
COPIED_BYTES = 2**28  # between GPUs


def measure_levels(device: "torch.device", directory: Path, budget_s: float) -> Iterator[Row | str]:
    """Yield a row for each level of this machine, and strings that report what was left out and why."""
    path = find_file()
    cluster = file.read(path) if path is not None else None
    yield from _measure_memory()
    yield from _measure_loopback(budget_s / 4)
    yield from _measure_disk(directory, budget_s / 4)
    yield from _measure_gpu(device, budget_s / 4)
    yield from list_network((*list_rdma(), *list_interfaces()), cluster)


def _row(
    level: str,
    size_bytes: int,
    Bps: float | None,
    latency_s: float | None,
    nominal_Bps: float | None = None,
) -> dict[str, Any]:
    return {
        "level": level,
        "bytes": size_bytes,
        "Bps": Bps,
        "nominal_Bps": nominal_Bps,
        "latency_s": latency_s,
    }


def list_network(interfaces: Iterable[Interface], cluster: Cluster | None) -> Iterator[Row | str]:
    """Yield the nominal rate of each interface, and the measured link between nodes of a cluster."""
    for each in interfaces:
        if each.up and (nominal := nominal_Bps(each)) is not None:
            kind = " ".join(filter(None, (each.kind, each.generation)))
            yield _row(f"network {each.name}, {kind}", 0, None, None, nominal)
    links = [
        link
        for link in (cluster.links if cluster is not None else ())
        if link.axis == "across" and link.beta_Bps is not None and link.beta_Bps.source == "measured"
    ]
    # messages between two ranks, if they were measured
    links = [link for link in links if link.collective == "send"] or links
    if links:
        best = max(links, key=_rate_of)
        alpha_s = best.alpha_s.value if best.alpha_s is not None else None
        yield _row("between nodes, cluster.json", 0, _rate_of(best), alpha_s)
        return
    yield (
        "the network between nodes needs ranks on two nodes: "
        "srun --nodes 2 --ntasks-per-node 1 paceline bench collectives --operations send-recv"
    )


def _rate_of(link: Link) -> float:
    return link.beta_Bps.value if link.beta_Bps is not None else 0.0


def _measure_memory() -> Iterator[Row | str]:
    levels = list_levels()
    if len(levels) == 1:
        yield "the system reports no sizes of caches: only the memory is measured"
    latencies_s: dict[int, float] = {}  # of chains; those of the largest levels are the same chain
    for at, level in enumerate(levels):
        latency_s = None  # by definition: the time of the nearest cache is subtracted
        if at or len(levels) == 1:
            chain_bytes = min(level.used_bytes, MAX_LINKS * LINK_BYTES)
            if chain_bytes not in latencies_s:
                latencies_s[chain_bytes] = measure_latency_s(level)
            latency_s = latencies_s[chain_bytes]
        yield _row(level.name, level.size_bytes or level.used_bytes, measure_copy_Bps(level), latency_s)
        if not holds_chain(level):
            yield (
                f"latency of {level.name}: of the largest chain, {format_bytes(MAX_LINKS * LINK_BYTES)}, "
                "which a cache holds at least in part"
            )


def _measure_loopback(budget_s: float) -> Iterator[Row | str]:
    """Measure messages between two ranks of this machine, over gloo."""
    from paceline.bench.collectives.request import CollectiveRequest
    from paceline.bench.collectives.workers import run_workers

    request = CollectiveRequest(
        operations=("send-recv",),
        backends=("gloo",),
        sizes_bytes=(SMALL_BYTES, LARGE_BYTES),
        seconds=max(0.05, budget_s / 8),
    )
    times_s: dict[int, float] = {}
    with contextlib.closing(run_workers(request, 2)) as items:
        for item in items:
            if isinstance(item, str):
                yield item
            else:
                measured: dict[str, Any] = dict(item)
                times_s[measured["bytes"]] = measured["median_s"]
    if len(times_s) == 2:
        latency_s, large_s = times_s[min(times_s)], times_s[max(times_s)]
        yield _row("loopback, two ranks", LARGE_BYTES, max(times_s) / large_s, latency_s)


def _measure_disk(directory: Path, budget_s: float) -> Iterator[Row | str]:
    """Measure reads of a file that is not in memory, and of single blocks at random places."""
    from paceline.bench.storage.suite import measure

    rows: dict[str, Any] = {str(row["test"]): row for row in measure(directory, budget_s, 1)}
    rates = {name: _rate(rows.get(name)) for name in ("large write", "direct read", "read", "random read")}
    per_s = rates["random read"]
    read_Bps = rates["direct read"] or rates["read"]
    size = int((rows.get("direct read") or rows.get("read") or {}).get("bytes") or 0)
    yield _row("disk, read", size, read_Bps, 1 / per_s if per_s else None)
    written = int((rows.get("large write") or {}).get("bytes") or 0)
    yield _row("disk, written", written, rates["large write"], None)
    yield f"the disk is that of {directory}"


def _rate(row: Any) -> float | None:
    """Return the bytes or the operations per second of a test of a directory, if it was measured."""
    return next((float(row[unit]) for unit in ("Bps", "per_s") if row is not None and row.get(unit)), None)


def _value(fact: Fact | None) -> float | None:
    return fact.value if fact is not None else None


def _measure_gpu(device: "torch.device", budget_s: float) -> Iterator[Row | str]:
    if device.type != "cuda":
        yield "no CUDA device: its memory, PCIe and NVLink are not measured"
        return
    import torch

    from paceline.bench.compute.kernels import clock_for, measure_memory
    from paceline.bench.timer import Budget, measure

    def time_s(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return measure(copy, Budget(budget_s / 16, budget_s / 64), clock_for(device)).median_s

    found_name = find_published_name(torch.cuda.get_device_name(device))
    sheet = sheets()[found_name].device() if found_name is not None else None
    nvlink = sheets()[found_name].links() if found_name is not None else ()
    nominal = {
        "memory": _value(sheet.memory_Bps) if sheet is not None else None,
        "PCIe": _value(sheet.to_device_Bps.get("pinned")) if sheet is not None else None,
        "GPU": _value(nvlink[0].beta_Bps) if nvlink else None,
    }
    for row in measure_memory(device, budget_s / 4):
        if isinstance(row, str):
            yield row
        elif row["operation"] == "copy":
            found: dict[str, Any] = dict(row)
            yield _row("memory of the GPU", found["bytes"], found["Bps"], None, nominal["memory"])
    ones = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    host = torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    peers = range(1, torch.cuda.device_count())
    others = {"PCIe, host to GPU": host} | {
        f"GPU 0 to GPU {at}": torch.ones(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{at}") for at in peers
    }
    for name, other in others.items():
        rate_Bps, latency_s = COPIED_BYTES / time_s(ones, other), time_s(ones[:4], other[:4])
        yield _row(name, COPIED_BYTES, rate_Bps, latency_s, nominal["PCIe" if other is host else "GPU"])
    if not peers:
        yield "one GPU: copies between GPUs are not measured"

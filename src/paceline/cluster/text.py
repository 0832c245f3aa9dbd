"""A machine as text for a terminal."""

import json
from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.cluster.machine import (
    Accelerator,
    BackendFacts,
    Directory,
    Interface,
    Machine,
    OfferedModule,
    Quota,
)
from paceline.cluster.modules import propose_modules
from paceline.cluster.published import sheets
from paceline.cluster.topology import count_gpu_links, find_nearest_nics
from paceline.units import format_bytes, format_count, several, without_controls

SHOWN = 3  # modules of a kind; the JSON file has all


def build_tables(machine: Machine) -> list[RenderableType]:
    """Return the facts as tables, from the processors outwards, without empty tables."""
    parts: list[RenderableType] = [_facts(machine)]
    if machine.accelerators:
        parts.append(_accelerators(machine))
    if machine.interfaces:
        parts.append(_interfaces(machine.interfaces))
    if machine.torch is not None:
        torch = machine.torch
        communication = (*torch.communication, machine.mpi) if machine.mpi else torch.communication
        parts.append(_backends(f"PyTorch {torch.version}", torch.backends))
        parts.append(_backends("communication", communication))
    if machine.directories:
        parts.append(_directories(machine.directories))
    notes = [f"{row.path}: {row.note}" for row in machine.directories if row.note]
    return [
        *parts,
        *(Text(without_controls(f"note: {note}"), style="yellow") for note in (*machine.silent, *notes)),
    ]


def _facts(machine: Machine) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in (
        ("host", f"{machine.host}, {machine.system}"),
        ("within", _surroundings(machine)),
        ("modules", ", ".join(machine.modules)),
        ("offered", _offered(machine.offered_modules)),
        ("proposed", _proposed(machine)),
        ("CPU", _cpu(machine)),
        ("extensions", ", ".join((*machine.cpu.vector, *machine.cpu.matrix))),
        ("NUMA", _numa(machine.cpu.numa)),
        ("memory", _memory(machine)),
        ("GPUs", _gpus(machine)),
        ("processors", _processors(machine)),
        ("peaks", _peaks(machine)),
        ("links", _links(machine)),
    ):
        if text:
            table.add_row(name, _plain(text))
    return table


def _surroundings(machine: Machine) -> str:
    parts = []
    if job := machine.slurm:
        words = [f"Slurm job {job.job}", f"on {job.partition}" if job.partition else ""]
        sizes = [
            f"{_number(job.nodes)} node{'s' * (job.nodes != 1)} ({job.node_list})" if job.nodes else "",
            f"{_number(job.tasks)} tasks" if job.tasks else "",
            f"{job.cpus_per_task} CPUs per task" if job.cpus_per_task else "",
            f"GPUs per node: {job.gpus_per_node}" if job.gpus_per_node else "",
            f"until {datetime.fromtimestamp(job.ends):%Y-%m-%d %H:%M}" if job.ends else "",
        ]
        parts.append(", ".join(part for part in (" ".join(word for word in words if word), *sizes) if part))
    if machine.container:
        parts.append(f"container: {machine.container}")
    return "; ".join(parts)


def _cpu(machine: Machine) -> str:
    cpu = machine.cpu
    size = f"{cpu.cores} cores" if cpu.cores else ""
    if cpu.sockets and cpu.cores:
        size = f"{cpu.sockets} × {cpu.cores // cpu.sockets} cores"
    threads = f"{cpu.threads} threads" if cpu.threads and cpu.threads != cpu.cores else ""
    usable = f"{cpu.usable_cores} usable"
    virtual = f"virtual, {cpu.virtual}" if cpu.virtual else ""
    return ", ".join(part for part in (cpu.name or cpu.architecture, size, threads, usable, virtual) if part)


def _numa(nodes: tuple[str, ...]) -> str:
    if len(nodes) < 2:
        return f"{len(nodes)} node" if nodes else ""
    return f"{len(nodes)} nodes with CPUs " + " │ ".join(nodes)


def _memory(machine: Machine) -> str:
    memory = machine.memory
    limit = (
        f", limited to {format_bytes(memory.limit_bytes)} by the control group" if memory.limit_bytes else ""
    )
    return f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} free{limit}"


def _gpus(machine: Machine) -> str:
    if not machine.accelerators:
        return "unknown, see below" if any("GPUs: " in reason for reason in machine.silent) else "none"
    names: dict[str, int] = {}
    for row in machine.accelerators:
        names[row.name] = names.get(row.name, 0) + 1
    driver = next((row.driver for row in machine.accelerators if row.driver), None)
    visible = (
        ""
        if machine.visible is None
        else f"; visible to this process: {', '.join(machine.visible) or 'none'}"
    )
    return (
        ", ".join(f"{count} × {name}" for name, count in names.items())
        + (f", driver {driver}" if driver else "")
        + visible
    )


def _peaks(machine: Machine) -> str:
    name = next((row.sheet for row in machine.accelerators if row.sheet), None)
    if name is None:
        return "not published" if any(row.kind != "mps" for row in machine.accelerators) else ""
    chip = sheets()[name].chip
    rows = [
        f"{dtype} {peak:,g}" + (f" ({chip.sparse[dtype]:,g})" if dtype in chip.sparse else "")
        for dtype, peak in chip.dense.items()
    ]
    return (
        ", ".join(rows) + " TFLOP/s, published" + ("; with 2:4 sparsity in brackets" if chip.sparse else "")
    )


def _processors(machine: Machine) -> str:
    """Return the number of processors of the first GPU that is published, and their common cache."""
    row = next((row for row in machine.accelerators if row.sheet), None)
    chip = sheets()[row.sheet].chip if row is not None and row.sheet is not None else None
    if row is None or chip is None or chip.sms is None:
        return ""
    words = "streaming multiprocessors" if row.kind == "cuda" else "compute units"
    cache = f", {chip.l2_MB:g} MiB of L2 cache" if chip.l2_MB is not None else ""
    return f"{chip.sms} {words}{cache}, published"


def _offered(modules: dict[str, tuple[OfferedModule, ...]]) -> str:
    """Return the modules of the module system by what they contain, the newest last."""
    return "; ".join(
        f"{what}: "
        + ("… " if len(found) > SHOWN else "")
        + ", ".join(f"{each.name} (default)" if each.is_default else each.name for each in found[-SHOWN:])
        for what, found in modules.items()
    )


def _proposed(machine: Machine) -> str:
    """Return a line for the site file, with modules that fit this PyTorch."""
    if machine.torch is None:
        return ""
    names = propose_modules(machine.offered_modules, machine.torch.cuda, machine.torch.rocm)
    return f"in site.toml: modules = {json.dumps(names)}" if names else ""


def _links(machine: Machine) -> str:
    if machine.topology is None:
        return ""
    pairs = count_gpu_links(machine.topology)
    return ", ".join(f"{link} between {several(count, 'pair')} of GPUs" for link, count in pairs.items())


def _accelerators(machine: Machine) -> Table:
    topology = machine.topology
    nearest = find_nearest_nics(topology) if topology else {}
    names = [row.name for row in machine.accelerators]
    columns = {
        "GPU": [str(row.index) for row in machine.accelerators],
        "name": names if len({*names}) > 1 else [],  # one name is in the facts above
        "memory": [
            format_bytes(row.memory_bytes) if row.memory_bytes else "" for row in machine.accelerators
        ],
        "power": [f"{row.power_W:g} W" if row.power_W else "" for row in machine.accelerators],
        "clocks": [_clocks(row) for row in machine.accelerators],
        "mode": [row.compute_mode or "" for row in machine.accelerators]
        if any(row.compute_mode not in (None, "Default") for row in machine.accelerators)
        else [],
        "instances": [_instances(row) for row in machine.accelerators],
    }
    keys = [f"GPU{row.index}" for row in machine.accelerators]
    if topology is not None:
        columns["NUMA"] = [topology.numa.get(key, "") for key in keys]
        columns["CPUs"] = [topology.cpus.get(key, "") for key in keys]
        columns["nearest network"] = [
            f"{', '.join(nearest[key][1])} ({nearest[key][0]})" if key in nearest else "" for key in keys
        ]
    return _table({name: cells for name, cells in columns.items() if any(cells)}, right=("memory", "power"))


def _clocks(row: Accelerator) -> str:
    """Return the highest clocks of processors and memory."""
    if row.sm_MHz is None or row.memory_MHz is None:
        return ""
    return f"{row.sm_MHz:g}, memory {row.memory_MHz:g} MHz"


def _instances(row: Accelerator) -> str:
    """Return the profiles of a GPU that is divided: "2 × 3g.20gb"."""
    if row.mig is None:
        return ""
    counts = Counter(instance.profile for instance in row.mig)
    return ", ".join(f"{count} × {profile}" for profile, count in counts.items()) or "none (MIG is on)"


def _interfaces(rows: Iterable[Interface]) -> RenderableType:
    up = [row for row in rows if row.up]
    down = [row.name for row in rows if not row.up]
    if not up:
        return Text("no network interface is up" + (f"; down: {', '.join(down)}" if down else ""))
    columns = {
        "network": [row.name for row in up],
        "kind": [" ".join(filter(None, (row.kind, row.generation))) for row in up],
        "speed": [_speed(row.Mbps) for row in up],
        "NUMA": [_number(row.numa) for row in up],
        "address": [", ".join(row.addresses) or row.ports or "" for row in up],
    }
    return _table(columns, right=("speed",), caption=f"down: {', '.join(down)}" if down else None)


def _speed(Mbps: int | None) -> str:
    return "unknown" if Mbps is None else f"{Mbps / 1000:g} Gbit/s" if Mbps >= 1000 else f"{Mbps} Mbit/s"


def _backends(title: str, rows: Iterable[BackendFacts]) -> Table:
    rows = list(rows)
    columns = {
        title: [row.name for row in rows],
        "available": ["yes" if row.available else "no" for row in rows],
        "version": [row.version or "" for row in rows],
        "": [", ".join(filter(None, (_flags(row), row.note))) for row in rows],
    }
    return _table(columns)


def _flags(row: BackendFacts) -> str:
    """Return the names of the flags that are on, then `not` and the name of those that are off."""
    words = [
        name if value is True else f"not {name}" if value is False else f"{name} {value}"
        for name, value in sorted(row.flags.items(), key=lambda item: item[1] is False)
    ]
    return ", ".join(words)


def _directories(rows: Iterable[Directory]) -> Table:
    rows = list(rows)
    columns = {
        "directory": [" ".join((row.path, *(f"${name}" for name in row.names))) for row in rows],
        "type": [row.filesystem or "" for row in rows],
        "free": [format_bytes(row.free_bytes) if row.free_bytes is not None else "" for row in rows],
        "of": [format_bytes(row.size_bytes) if row.size_bytes is not None else "" for row in rows],
        "files free": [format_count(row.free_files) if row.free_files is not None else "" for row in rows],
        "stripes": [_stripes(row) for row in rows],
        "quota": [_quota(row.quota) if row.quota else "" for row in rows],
    }
    return _table(columns, right=("free", "of", "files free"))


def _stripes(row: Directory) -> str:
    """Return how Lustre places a new file: "4 of 1 MiB in pool flash"."""
    if row.stripes is None:
        return ""
    count = "all targets" if row.stripes < 0 else str(row.stripes)
    size = f" of {format_bytes(row.stripe_bytes)}" if row.stripe_bytes else ""
    return f"{count}{size}" + (f" in pool {row.pool}" if row.pool else "")


def _quota(quota: Quota) -> str:
    limit, files = quota.limit_bytes or quota.soft_bytes, quota.limit_files or quota.soft_files
    used = f"{format_bytes(quota.used_bytes)} of {format_bytes(limit) if limit else 'no limit'}"
    if quota.used_files is None:
        return used
    return f"{used}, {quota.used_files:,} of {f'{files:,}' if files else 'any number of'} files"


def _table(columns: dict[str, list[str]], right: tuple[str, ...] = (), caption: str | None = None) -> Table:
    """Return a table without empty columns."""
    below = _plain(caption) if caption is not None else None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption=below, caption_justify="left")
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    for name in filled:
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold"
        )
    for cells in zip(*filled.values(), strict=True):
        table.add_row(*map(_plain, cells))
    return table


def _plain(text: str) -> Text:
    """Return a text as it is: names of devices and folders may look like commands of rich or a terminal."""
    return Text(without_controls(text))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"

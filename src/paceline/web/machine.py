"""Samples of the machines as figures of a page: lines for each node, and a map of ranks or GPUs over time."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import PlanError
from paceline.events import Started
from paceline.monitor.columns import COLUMNS, kind_of, number_of
from paceline.plan.plan import parse
from paceline.report.curves import BucketColumn
from paceline.report.machine_samples import NodeSamples
from paceline.report.run_view import RunView
from paceline.units import is_whole_number, without_controls
from paceline.web.curves import round_to

MAX_POINTS = 300  # of a line
MAX_LINES = 16  # of a figure
MAX_CELLS = 150  # of a row of the map
MAX_ROWS = 512  # of the map
# By figure: title, and the columns of sample files that it shows.
FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GPU utilization", ("gpuN utilization", "gpuN sm active")),
    ("GPU memory", ("gpuN memory used",)),
    ("GPU power", ("gpuN power",)),
    ("GPU clock", ("gpuN clock sm",)),
    ("GPU temperature", ("gpuN temperature",)),
    ("PCIe", ("gpuN pcie in", "gpuN pcie out")),
    ("NVLink", ("gpuN nvlink in", "gpuN nvlink out")),
    ("Processors", ("cpu",)),
    ("Processors by rank", ("rankN cpu",)),
    ("Memory", ("memory used", "job memory used", "swap used")),
    ("Memory by rank", ("rankN memory",)),
    ("Network", ("network in", "network out")),
    ("Disk", ("disk read", "disk write")),
)
# By map: title, column, and what a row is.
MAPS = (
    ("GPU utilization", "gpuN utilization", "gpu"),
    ("GPU power", "gpuN power", "gpu"),
    ("GPU temperature", "gpuN temperature", "gpu"),
    ("Processor time", "rankN cpu", "rank"),
    ("Memory", "rankN memory", "rank"),
)

Columns = dict[str, list[Any]]


def build_machine(view: RunView, chosen: str) -> tuple[dict[str, Any], dict[str, Columns]]:
    """Return the figures of one node, and their lines over the seconds since the first start.

    chosen: number of the node in the list of all, else the first node is shown."""
    nodes = _list_nodes(view)
    at = int(chosen) if is_whole_number(chosen) and int(chosen) < len(nodes) else 0
    panel: dict[str, Any] = {
        "nodes": [without_controls(node.node) for node in nodes],
        "node": at,
        "figures": [],
    }
    tables: dict[str, Columns] = {}
    if not nodes:
        return panel, tables
    node, begin = nodes[at], _find_begin(view, nodes)
    panel["absent"] = [without_controls(f"{name}: {why}")[:300] for name, why in node.absent.items()][:8]
    size = max(1, -(-len(node.times) // MAX_POINTS))
    groups = [(first, min(first + size, len(node.times))) for first in range(0, len(node.times), size)]
    x = [round(node.times[end - 1] - begin, 1) for _, end in groups]
    for title, kinds in FIGURES:
        columns = [name for name in node.columns if kind_of(name) in kinds][:MAX_LINES]
        if not columns:
            continue
        table: Columns = {"x": x}
        for name in columns:
            table[_label(name, len(kinds) > 1)] = [_mean(node.columns[name], *group) for group in groups]
        tables[f"machine:{title}"] = table
        panel["figures"].append({"title": title, "unit": COLUMNS[kinds[0]].unit})
    return panel, tables


def list_last_values(view: RunView) -> list[dict[str, Any]]:
    """Return for each node its name, the time of its last sample, and the last value of each column.

    "totals": the last value of each limit, such as "memory total"."""
    return [
        {
            "node": without_controls(node.node),
            "time": node.times[-1],
            "values": {
                name: column.group(len(node.times) - 1, len(node.times))[2]
                for name, column in node.columns.items()
            },
            "totals": dict(node.totals),
        }
        for node in _list_nodes(view)
    ]


def build_map(
    view: RunView, chosen: str, started: Started | None
) -> tuple[dict[str, Any], dict[str, Columns]]:
    """Return a row for each rank or GPU of all nodes, and their means over equal intervals of time.

    chosen: title of the map, else the first that has samples is shown."""
    nodes = _list_nodes(view)
    kinds = {kind_of(name) for node in nodes for name in node.columns}
    titles = [title for title, kind, _ in MAPS if kind in kinds]
    panel: dict[str, Any] = {"titles": titles, "rows": []}
    if not titles:
        return panel, {}
    title = chosen if chosen in titles else titles[0]
    _, kind, what = next(row for row in MAPS if row[0] == title)
    begin, end = _find_begin(view, nodes), max(node.times[-1] for node in nodes)
    width = 1.0
    while (end - begin) / width > MAX_CELLS:
        width *= 2
    cells = range(int((end - begin) // width) + 1)
    table: Columns = {"x": [at * width for at in cells]}
    rows: list[dict[str, Any]] = []
    for node, name, number in _list_rows(nodes, kind, what):
        if len(rows) == MAX_ROWS:
            panel["problem"] = f"only the first {MAX_ROWS} rows are shown"
            break
        rows.append({"node": without_controls(node.node), what: number})
        table[str(len(rows) - 1)] = _fill_cells(node, node.columns[name], begin, width, cells)
    _add_places(rows, started)
    unit = COLUMNS[kind].unit
    return panel | {"title": title, "unit": unit, "what": what, "width_s": width, "rows": rows}, {
        "map": table
    }


def _list_nodes(view: RunView) -> list[NodeSamples]:
    return [node for node in view.machine.nodes.values() if len(node.times)]


def _find_begin(view: RunView, nodes: Sequence[NodeSamples]) -> float:
    first = view.log.first_start
    return min([node.times[0] for node in nodes] + ([first.time] if first is not None else []))


def _label(name: str, is_long: bool) -> str:
    """Return a short name of a line: "gpu0 power" is "gpu0" where all lines are of power."""
    first, _, rest = name.partition(" ")
    is_numbered = kind_of(name) != name
    return f"{first} {rest.split()[-1]}" if is_numbered and is_long else first if is_numbered else name


def _mean(column: BucketColumn, begin: int, end: int) -> float | None:
    total, count = sum(column.total[begin:end]), sum(column.count[begin:end])
    return round_to(total / count, 4) if count else None


def _list_rows(nodes: Sequence[NodeSamples], kind: str, what: str) -> Iterator[tuple[NodeSamples, str, int]]:
    for node in nodes:
        numbered = [(number_of(name, what) or 0, name) for name in node.columns if kind_of(name) == kind]
        for number, name in sorted(numbered):
            yield node, name, number


def _fill_cells(
    node: NodeSamples, column: BucketColumn, begin: float, width: float, cells: range
) -> list[float | None]:
    values = []
    first = 0
    for at in cells:
        until = bisect.bisect_left(node.times, begin + (at + 1) * width, first)
        values.append(_mean(column, first, until) if until > first else None)
        first = until
    return values


def _add_places(rows: list[dict[str, Any]], started: Started | None) -> None:
    """Add the coordinates of each rank on the axes of the plan."""
    if started is None:
        return
    try:
        plan = parse(started.plan).resolve(started.ranks)
    except PlanError:
        return
    for row in rows:
        if "rank" in row and row["rank"] < started.ranks:
            place = plan.place(row["rank"])
            row |= {
                name: getattr(place, name) for name in ("pp", "dp", "cp", "tp") if getattr(plan, name) > 1
            }

"""Ranks by phase, and the nodes of a run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from paceline.doctor.heartbeat import BACKWARD, DATA, FORWARD, OWN_CODE, REPORT, UPDATE
from paceline.inspect.straggler import SLOW_RATIO, SLOW_S, SLOW_SHARE
from paceline.terminal.braille import draw_curve
from paceline.terminal.text import Lines, beside, fit, plain, shorten, style_plot, table, title
from paceline.units import format_bytes, format_seconds

# By phase of a step: the letter in bars.
PHASES = {DATA: "d", FORWARD: "f", BACKWARD: "b", UPDATE: "u", REPORT: "r", OWN_CODE: "o"}
SILENT_S = 5.0  # without a heartbeat, while other ranks have newer ones
SPARK_HEIGHT = 3

Panels = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Sequence[Any]]]
Row = Mapping[str, Any]


def build_ranks(
    panel: Mapping[str, Any] | None, width: int, chosen: int | None, limit: int | None = None
) -> Lines:
    """Return a line for each rank with its phases. ▲ marks a phase that is much longer than on other ranks.

    chosen: rank whose line is emphasized. limit: number of ranks; the slowest are shown."""
    if panel is None:
        return plain(["reading heartbeats …"], "dim")
    if "problem" in panel and not panel.get("ranks"):
        return plain([panel["problem"] or "ranks appear here when they start"], "dim")
    rows = panel["ranks"]
    slow = find_slow_phases(rows)
    order = [*range(len(rows))]
    if limit is not None and len(rows) > limit - 1:
        order = sorted(sorted(order, key=lambda at: (-len(slow[at]), -_step_s(rows[at])))[: limit - 1])
    phases = [phase for phase in PHASES if any(row.get("spent_s", {}).get(phase) for row in rows)]
    newest = max((row["time"] for row in rows if "time" in row), default=0.0)
    top = max(map(_step_s, rows), default=0.0)
    heads = ("rank", "state", "step", *(f"{phase} " for phase in phases))
    texts = [_describe_rank(rows[at], slow[at], phases, newest) for at in order]
    lines = plain(table(texts, heads, width, (0, 1)))
    size = max(map(len, lines))
    for at, line in zip([None, *order], lines, strict=True):
        room = width - size - 2
        bar = "" if room < 8 else _draw_phases(rows[at], top, room) if at is not None else "a step"
        line.append(" " * (size - len(line) + 2) + bar)
        if at is None:
            line.stylize("dim")
        elif slow[at]:
            line.stylize("bold magenta")
        if at is not None and at == chosen:
            line.append(" " * (width - line.cell_len))
            line.stylize("reverse")
    hidden = len(rows) - len(order)
    lines += plain([f"{hidden} more: 3"] if hidden else [], "dim")
    legend = "  ".join(f"{PHASES[phase]} {phase}" for phase in phases)
    if limit is None:
        lines += [Text(), Text(shorten(f"▲ much longer than on other ranks   {legend}", width), "dim")]
    return lines + plain([panel["problem"]] if panel["problem"] else [], "magenta")


def find_slow_phases(rows: Sequence[Row]) -> list[set[str]]:
    """Return for each rank the phases that take much longer than the median of the other ranks.

    The backward pass is left out: in it, the other ranks wait for a slow one."""
    slow: list[set[str]] = [set() for _ in rows]
    known = [at for at, row in enumerate(rows) if row.get("spent_s")]
    for phase in (DATA, FORWARD, UPDATE, OWN_CODE):
        values = {at: rows[at]["spent_s"].get(phase, 0.0) for at in known}
        for at in known:
            others = [value for other, value in values.items() if other != at]
            usual = statistics.median(others) if others else values[at]
            more_s = values[at] - usual
            if values[at] > SLOW_RATIO * usual and more_s > max(SLOW_S, SLOW_SHARE * _step_s(rows[at])):
                slow[at].add(phase)
    return slow


def _step_s(row: Row) -> float:
    return sum(row.get("spent_s", {}).get(phase, 0.0) for phase in PHASES)


def _describe_rank(row: Row, slow: set[str], phases: Sequence[str], newest: float) -> tuple[str, ...]:
    if "spent_s" not in row:
        return (str(row["rank"]), row["state"], "–", *("–" for _ in phases))
    state = row["phase"] if row["state"] == "runs" else row["state"]
    late_s = newest - row["time"]
    if row["state"] == "runs" and late_s > SILENT_S:
        state = f"silent {format_seconds(round(late_s))}"
    cells = []
    for phase in phases:
        seconds = row["spent_s"].get(phase)
        text = format_seconds(seconds) if seconds is not None else "–"
        cells.append(text + ("▲" if phase in slow else " "))
    return (f"{row['rank']} {row['host'][:16]}", state, f"{row['step']:,}", *cells)


def _draw_phases(row: Row, top: float, size: int) -> str:
    """Return a bar of letters, with the length of each phase relative to the longest step of a rank."""
    bar, seconds = "", 0.0
    for phase, letter in PHASES.items():
        seconds += row.get("spent_s", {}).get(phase, 0.0)
        until = round(seconds / top * size) if top else 0
        bar += letter * (until - len(bar))
    return bar


def build_nodes(nodes: Sequence[Row], chosen: int, width: int, limit: int | None = None) -> Lines:
    """Return a line for each node with its last values. chosen: node that is emphasized."""
    if not nodes:
        return plain(["samples of the nodes appear here while a run trains with --monitor"], "dim")
    shown = nodes[:limit]
    rows = [_describe_node(node) for node in shown]
    used = [at for at in range(len(NODE_HEADS)) if any(row[at] for row in rows)]
    texts = [tuple(row[at] or "–" for at in used) for row in rows]
    lines = plain(table(texts, tuple(NODE_HEADS[at] for at in used), width))
    lines[0].stylize("dim")
    if len(nodes) > 1 and limit is None and chosen < len(shown):
        lines[chosen + 1] = Text(fit(lines[chosen + 1].plain, width), "reverse", no_wrap=True)
    hidden = len(nodes) - len(shown)
    return lines + plain([f"{hidden} more: 4"] if hidden else [], "dim")


NODE_HEADS = ("node", "CPU", "memory", "GPU", "GPU memory", "power", "disk r+w MB/s", "network in+out MB/s")


def _describe_node(node: Row) -> tuple[str, ...]:
    values, totals = node["values"], node["totals"]

    def gpus(name: str) -> list[float]:
        found = [value for key, value in values.items() if key.startswith("gpu") and key.endswith(f" {name}")]
        return [value for value in found if value == value]

    def pair(first: str, second: str) -> str:
        known = [values.get(name) for name in (first, second)]
        texts = ["–" if value is None or value != value else f"{value:.3g}" for value in known]
        return "+".join(texts) if texts != ["–", "–"] else ""

    job = "job memory used" in values and totals.get("job memory limit")
    used, total = ("job memory used", "job memory limit") if job else ("memory used", "memory total")
    gpu_total = sum(value for key, value in totals.items() if key.startswith("gpu") and "memory" in key)
    utilization, gpu_memory, power = map(gpus, ("utilization", "memory used", "power"))
    return (
        node["node"][:24],
        _percent(values.get("cpu")),
        _share(values.get(used), totals.get(total)),
        f"{len(utilization)}× {statistics.mean(utilization):.0f} %" if utilization else "",
        _share(sum(gpu_memory), gpu_total) if gpu_memory else "",
        f"{sum(power):.0f} W" if power else "",
        pair("disk read", "disk write"),
        pair("network in", "network out"),
    )


def _percent(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.0f} %"


def _share(used: float | None, total: float | None) -> str:
    """Return MiB as text, with their share of the total if that is known."""
    if used is None or used != used:
        return ""
    text = format_bytes(used * 2**20)
    return f"{text} of {format_bytes(total * 2**20)}" if total else text


def build_figures(panels: Panels, tables: Tables, width: int) -> Lines:
    """Return the samples of the chosen node over time."""
    machine = panels.get("machine", {})
    figures = machine.get("figures", [])
    if not figures:
        return []
    columns = max(1, (width + 2) // 40)
    size = (width - 2 * (columns - 1)) // columns
    blocks = [
        block
        for figure in figures
        for block in _draw_figure(figure, tables[f"machine:{figure['title']}"], size)
    ]
    lines: Lines = [title(f"Samples of {machine['nodes'][machine['node']]}", width)]
    for row in range(0, len(blocks), columns):
        of_row = blocks[row : row + columns]
        lines += beside(of_row, [size] * len(of_row))
    absent = [line for text in machine.get("absent", []) for line in plain([shorten(text, width)], "dim")]
    return lines + absent


def _draw_figure(figure: Mapping[str, Any], data: Mapping[str, Sequence[Any]], width: int) -> list[Lines]:
    """Return a small plot for each line of a figure that is not zero all the time."""
    blocks = []
    for name, values in data.items():
        known = [value for value in values if value is not None]
        if name == "x" or not any(known):
            continue
        label = _name_line(figure["title"], name)
        figures = f"{known[-1]:,.4g} {figure['unit']}, max {max(known):,.4g}"
        head = Text(shorten(label, width - len(figures) - 1), "bold", no_wrap=True)
        head.append(f" {figures}", "not bold")
        head.truncate(width)
        # The axis begins at zero, so that noise of an idle device looks small.
        plot = draw_curve(data["x"], values, values, values, width - 1, SPARK_HEIGHT, base=0.0)
        blocks.append([head, *style_plot(plot)])
    return blocks


def _name_line(title: str, name: str) -> str:
    """Return a short name: "GPU power", "gpu0" -> "GPU power gpu0"; "Disk", "disk read" -> "Disk read"."""
    what = title.removesuffix(" by rank")
    if name == "cpu" or name.startswith(what.lower()):
        return what if name == "cpu" else name.capitalize()
    return f"{what} {name}"

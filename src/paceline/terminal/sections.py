"""Sections of a screen from the panels of a run: header, findings, log, parts of a step, list of runs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from paceline.inspect.text import format_cost
from paceline.terminal.braille import draw_bar
from paceline.terminal.text import Lines, fit, format_energy, format_value, plain, shorten, table, title, wrap
from paceline.units import format_bytes, format_count, format_seconds, several

Panels = Mapping[str, Any]
Table = Mapping[str, Sequence[Any]]
# By state: a sign and a style.
STATES = {
    "running": ("▶", "bold green"),
    "done": ("✓", "bold blue"),
    "stopped": ("■", "bold magenta"),
    "interrupted": ("!", "bold magenta"),
    "failed": ("✗", "bold red"),
    "damaged": ("✗", "bold red"),
    "not started": ("·", "bold"),
}
BAR_WIDTH = 12
OLD_S = 60.0  # data of a running run that is older is emphasized
LOG_STYLES = {"failed": "bold red", "stalled": "bold red", "noted": "magenta", "saved": "green"}


def build_header(panels: Panels, now: float, width: int) -> Lines:
    """Return three lines: state and progress; what trains, and how fast; the last metrics or the state."""
    header = panels.get("header")
    if panels.get("gone"):
        return plain(["the folder of this run is gone", "", "press r for the list of runs"], "bold red")
    if header is None:
        return plain([*panels.get("problems", ["reading …"]), "", ""][:3], "")
    sign, style = STATES.get(header["state"], ("?", "bold"))
    progress, age = _describe_progress(header), _describe_age(header, now)
    room = width - len(header["state"]) - cell_len(progress) - cell_len(age) - 8
    first = Text(no_wrap=True)
    first.append(f"{sign} {header['state']}", style)
    first.append(f"  {shorten(header['name'], max(8, room))}", "bold")
    first.append(f"  {progress}")
    gap = width - first.cell_len - cell_len(age)
    is_old = header["state"] == "running" and now - (header["updated"] or now) > OLD_S
    if gap > 1:
        first.append(" " * gap + age, "bold magenta" if is_old else "dim")
    first.truncate(width)
    metrics = "  ".join(f"{name} {format_value(value)}" for name, value in header.get("metrics", {}).items())
    is_calm = header["state"] in ("running", "done", "not started")
    third = metrics if is_calm else header["sentence"]
    return [
        first,
        Text(shorten(_describe_setup(header), width), "", no_wrap=True),
        Text(shorten(third, width), "" if is_calm else "magenta", no_wrap=True),
    ]


def _describe_progress(header: Mapping[str, Any]) -> str:
    steps = header.get("steps")
    if not steps:
        return ""
    share = min(1.0, header["step"] / steps)
    bar = draw_bar(share, BAR_WIDTH).replace(" ", "·")
    left = header.get("left_s")
    return f"{bar} {share:.0%}  step {header['step']:,} of {steps:,}" + (
        f"  {format_seconds(left)} left" if left is not None else ""
    )


def _describe_age(header: Mapping[str, Any], now: float) -> str:
    if header["updated"] is None:
        return "no data yet"
    age_s = max(0.0, now - header["updated"])
    if age_s > 86400:
        return f"data {age_s / 86400:.0f} d old"
    return f"data {format_seconds(round(age_s)) if age_s >= 1 else '0 s'} old"


def _describe_setup(header: Mapping[str, Any]) -> str:
    """Return task, plan, ranks and rates, the most important first."""
    if "task" not in header:
        return header["sentence"] if header["state"] != "not started" else "not started yet"
    parts = [header["task"], f"{header['plan']} on {several(header['ranks'], 'rank')}"]
    if header["samples_per_s"] is not None:
        parts.append(f"{format_count(header['samples_per_s'])} samples/s")
    if header["step_s"] is not None:
        parts.append(f"{format_seconds(header['step_s'])} a step")
    if header.get("mfu") is not None:
        parts.append(f"MFU {header['mfu']:.0%}")
    if header.get("cost") is not None:
        whole = header["cost"] + (header["cost_to_end"] or 0.0)
        parts.append(f"cost {header['cost']:,.2f}" + (f" of {whole:,.2f}" if header["cost_to_end"] else ""))
    parts += [f"batch {header['batch']}", f"{header['device']} {header['precision']}"]
    parts.append(f"{format_count(header['parameters'])} parameters")
    if header["energy_J"] is not None:
        parts.append(format_energy(header["energy_J"]))
    if header["starts"] > 1:
        parts.append(f"started {header['starts']} times")
    return " · ".join(parts)


def build_findings(panels: Panels, width: int, limit: int | None = None) -> Lines:
    """Return the findings, each in a line with a limit, else whole with its fix."""
    panel = panels.get("findings")
    if panel is None:
        return plain(["reading the files of the run; findings appear here"], "dim")
    if "problem" in panel:
        return plain(wrap(panel["problem"], width), "magenta")
    lines: Lines = []
    for finding in panel["findings"]:
        cost = format_cost(finding["cost_share"], finding["lost_s"], finding["to_end_s"])
        text = finding["sentence"] + (f" ({cost})" if cost else "")
        if limit is not None:
            lines.append(Text(shorten(f"! {text}", width), "", no_wrap=True))
            continue
        lines += plain(wrap(f"! {text}", width, "  "), "bold")
        lines += plain(
            ["  " + line for line in wrap(f"fix: {finding['fix']}", width - 2)] if finding["fix"] else []
        )
        lines.append(Text())
    if limit is not None:
        more = len(lines) - limit
        if more > 0:
            lines = [*lines[: limit - 1], Text(f"  {more + 1} more: 6", "dim")]
        return lines or plain(["none so far"], "dim")
    if not lines:
        lines = [Text("nothing found so far"), Text()]
    if panel["checked"]:
        lines += plain(wrap(f"checked: {', '.join(panel['checked'])}", width, "  "), "dim")
    for what, why in panel["not_checked"].items():
        lines += plain(wrap(f"not checked: {what}: {why}", width, "  "), "dim")
    return lines + plain([line for note in panel["notes"] for line in wrap(note, width, "  ")], "dim")


def build_problems(panels: Panels, width: int) -> Lines:
    """Return what is absent, damaged or cannot be drawn."""
    return plain([line for text in panels.get("problems", ()) for line in wrap(text, width, "  ")], "magenta")


def build_log(log: Table, width: int, limit: int | None = None) -> Lines:
    """Return the events besides steps, the last at the end. With a limit, one line for each of the last."""
    rows = [*zip(log.get("time", ()), log.get("kind", ()), log.get("text", ()), strict=True)]
    if not rows:
        return plain(["nothing has happened yet"], "dim")
    lines: Lines = []
    for at, kind, text in rows[-limit:] if limit is not None else rows:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        pieces = [text] if limit is not None else wrap(text, max(10, width - 10))
        for number, piece in enumerate(pieces):
            line = Text(no_wrap=True)
            line.append(f"{clock}  " if not number else " " * 10, "dim")
            line.append(shorten(piece, width - 10), LOG_STYLES.get(kind, ""))
            lines.append(line)
    return lines


def build_parts(panels: Panels, width: int) -> Lines:
    """Return the parts of a step and of memory, measured beside predicted."""
    parts = panels.get("parts", {})
    if "problem" in parts:
        hint = "train with --profile to see the parts of a step and of memory here"
        return plain([*wrap(parts["problem"], width), hint], "dim")
    lines = [title("A step", width, f"{format_seconds(parts['step_s'])} measured")]
    lines += _compare(parts["time"], width, format_seconds)
    if parts["straggler"] is not None:
        busy, mean = (format_seconds(parts[name]) for name in ("straggler_busy_s", "mean_busy_s"))
        text = f"slowest in most profiles: rank {parts['straggler']}, busy {busy} a step, mean {mean}"
        lines += plain([shorten(text, width)])
    lines += [Text(), title("Memory", width, f"of rank {parts['peak_rank']}, at its peak")]
    lines += _compare(parts["memory"], width, format_bytes)
    if parts["unpredicted"]:
        lines += [Text(), *plain(wrap(f"no prediction: {parts['unpredicted']}", width), "dim")]
    return lines


def _compare(rows: Sequence[Sequence[Any]], width: int, form: Any) -> Lines:
    top = max((value for row in rows for value in (row[1], row[2]) if value), default=0.0)
    size = max(4, width - 54)
    texts = []
    for name, measured, predicted, spread in rows:
        error = f" ± {form(spread)}" if predicted is not None and spread else ""
        bar = draw_bar(measured / top if top and measured else 0.0, size)
        texts.append((name, form(measured), bar, (form(predicted) if predicted is not None else "–") + error))
    return plain(table(texts, ("", "measured", " " * size, "predicted"), width, (0, 2, 3)))


def build_runs(rows: Sequence[Mapping[str, Any]], problem: str, chosen: int, width: int) -> Lines:
    """Return the list of runs; the line `chosen` + 1 is emphasized."""
    texts = []
    for row in rows:
        sign, _ = STATES.get(row["state"], ("?", ""))
        step = (
            f"{row['step']:,}" + (f"/{row['steps']:,}" if row.get("steps") else "") if "step" in row else "–"
        )
        rate = row.get("samples_per_s")
        texts.append(
            (
                shorten(row["name"], max(16, width - 60)),
                f"{sign} {row['state']}",
                step,
                format_value(row.get("loss")),
                format_count(rate) if rate is not None else "–",
                row["problem"] or row.get("plan", ""),
            )
        )
    heads = ("  run", "state", "step", "loss", "samples/s", "plan")
    texts = [(f"  {name}", *rest) for name, *rest in texts]
    first, *lines = plain(table(texts, heads, width, (0, 1, 5)))
    first.stylize("dim")
    for at, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if at == chosen:
            lines[at] = Text(fit("▸" + line.plain[1:], width), "reverse", no_wrap=True)
        elif row["state"] == "running":
            line.stylize("bold")
    return [first, *lines, *plain(wrap(problem, width), "magenta")]

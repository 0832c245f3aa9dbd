"""Curves of a run as braille plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from paceline.terminal.braille import draw_curve
from paceline.terminal.text import (
    Lines,
    beside,
    format_edge,
    format_energy,
    format_value,
    plain,
    shorten,
    style_plot,
)
from paceline.units import format_count, format_seconds

MIN_WIDTH = 38  # of a plot, with its axis
MIN_HEIGHT = 5  # with its title and the axis below
GUTTER = 9  # for the values at the vertical axis
SIGNS = {"save": "◆", "restart": "▲", "failure": "✗", "stall": "■"}

Panels = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Sequence[Any]]]


def build_grid(
    panels: Panels, tables: Tables, width: int, height: int, is_log: bool, most: int = 99
) -> Lines:
    """Return the curves in rows and columns. They take `height` lines, or more if there are many."""
    names = panels.get("curves", {}).get("names", [])
    shown = [name for name in names if tables.get(f"curve:{name}", {}).get("x")][:most]
    if not shown:
        return plain(
            ["no curve has this text in its name" if names else "curves appear with the first step"], "dim"
        )
    columns = max(1, min(len(shown), (width + 2) // (MIN_WIDTH + 2)))
    rows = -(-len(shown) // columns)
    columns = -(-len(shown) // rows)  # rows of equal length
    each = max(MIN_HEIGHT, min(14, height // rows))
    size = (width - 2 * (columns - 1)) // columns
    lines: Lines = []
    for row in range(rows):
        of_row = shown[row * columns : (row + 1) * columns]
        blocks = [build_plot(name, panels, tables, size, each, is_log) for name in of_row]
        lines += beside(blocks, [size] * len(blocks))
    return lines


def build_plot(key: str, panels: Panels, tables: Tables, width: int, height: int, is_log: bool) -> Lines:
    """Return a curve in `height` lines: its name and last value, the plot, and the horizontal axis.

    is_log: for losses only."""
    curve, curves = tables[f"curve:{key}"], panels["curves"]
    kind, _, name = key.partition(":")
    is_log = is_log and "loss" in name
    x, mean = curve["x"], curve["mean"]
    end = max(table["x"][-1] for label, table in tables.items() if label.startswith("curve:") and table["x"])
    plot = draw_curve(
        x, mean, curve["low"], curve["high"], width - GUTTER, height - 2, is_log, (min(0.0, x[0]), end)
    )
    label = name if kind == "step" or "/" in name else f"validation {name}"
    last = next((value for value in reversed(curve["last"]) if value is not None), None)
    head = Text(no_wrap=True)
    head.append(shorten(label, width - 12), "bold")
    head.append(f" {format_value(last)}")
    head.append(" log" if is_log else "", "dim")
    lines = [head]
    rows = style_plot(plot)
    for at, row in enumerate(rows):
        value = plot.high if at == 0 else plot.low if at == len(rows) - 1 else None
        text = format_edge(value) if value is not None else ""
        line = Text(f"{text:>{GUTTER - 2}} ", "dim", no_wrap=True)
        line.append("┤" if text else "│", "dim")
        line.append_text(row)
        lines.append(line)
    lines.append(_build_axis(curves, min(0.0, x[0]), end, width))
    return lines


def _build_axis(curves: Mapping[str, Any], begin: float, end: float, width: int) -> Text:
    """Return the horizontal axis with its end, and saves, restarts and failures on it."""
    size = width - GUTTER
    cells = ["─"] * size
    for mark in curves["marks"]:
        if begin <= mark["x"] <= end:
            at = round((mark["x"] - begin) / (end - begin) * (size - 1)) if end > begin else size - 1
            cells[at] = SIGNS[mark["kind"]]
    label = f" {_format_axis(curves['axis'], end)}"
    line = Text(" " * (GUTTER - 1) + "└", "dim", no_wrap=True)
    line.append("".join(cells)[: max(0, size - cell_len(label))], "dim")
    line.append(label, "dim")
    for at, char in enumerate(line.plain):
        if char in "✗■":
            line.stylize("bold red", at, at + 1)
        elif char in "◆▲":
            line.stylize("not dim bold", at, at + 1)
    return line


def _format_axis(axis: str, value: float) -> str:
    if axis == "time":
        return format_seconds(value)
    if axis == "energy":
        return format_energy(value)
    return f"{axis} {value:,.0f}" if value < 1e7 else f"{axis} {format_count(value)}"

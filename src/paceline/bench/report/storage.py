"""Rates of directories, as a table and as bars."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.bench.report.bench import Column, build_table
from paceline.bench.report.compute import number
from paceline.bench.result import Result, Row
from paceline.plotting.figure import COLOURS, figure
from paceline.units import format_bytes, format_count

CELL_WIDTH = 24  # characters of a directory's column


def directories(result: Result) -> list[str]:
    """Return the measured directories."""
    return list(dict.fromkeys(str(row["directory"]) for row in result.rows))


def show(console: Console, result: Result) -> None:
    """Print a result, with as many directories side by side as the terminal has space for."""
    names = directories(result)
    columns = max(1, (console.width - 14) // CELL_WIDTH)
    for begin in range(0, len(names), columns):
        console.print(_build_table(result, names[begin : begin + columns]))
    for line in (*footnotes(result), *(f"{row['directory']}: {row['advice']}" for row in result.summary)):
        console.print(line, markup=False, soft_wrap=True)


def _build_table(result: Result, names: Sequence[str]) -> Table:
    cells = {(row["directory"], row["test"]): row for row in result.rows}
    tests = list(dict.fromkeys(row["test"] for row in result.rows))
    any_row = {row["directory"]: row for row in result.rows}

    def column(name: str) -> Column:
        def text(line: Row) -> str:
            if line["test"] in FACTS:
                return FACTS[str(line["test"])](any_row[name])
            return format_cell(cells[name, line["test"]]) if (name, line["test"]) in cells else "—"

        return Column(_shorten(name), text)

    lines: list[Row] = [{"test": test} for test in (*FACTS, *tests)]
    return build_table(lines, [Column("", lambda row: str(row["test"]), right=False), *map(column, names)])


FACTS: dict[str, Callable[[Row], str]] = {
    "file system": lambda row: str(row.get("filesystem") or "—"),
    "free": lambda row: format_bytes(number(row, "free_bytes")) + _by_quota(row),
    "files free": lambda row: (
        format_count(number(row, "free_files")) + _by_quota(row) if row.get("free_files") is not None else "—"
    ),
}


def _by_quota(row: Row) -> str:
    return " (quota)" if row.get("quota") else ""


def _shorten(name: str) -> str:
    return name if len(name) < CELL_WIDTH - 2 else f"…{name[-CELL_WIDTH + 3 :]}"


def format_cell(row: Row) -> str:
    """Return the rate of a test, with a star if the row has a note."""
    star = "*" if row.get("note") else ""
    if not row.get("n"):
        return f"—{star}"
    bytes_Bps = f"{format_count(number(row, 'bytes') / number(row, 'seconds'))}B/s"
    if "Bps" in row:
        return bytes_Bps + star
    return (
        f"{number(row, 'per_s'):,.0f}/s" + (f", {bytes_Bps}" if row["test"] == "small write" else "") + star
    )


def footnotes(result: Result) -> list[str]:
    """Return the notes to which the stars refer."""
    return [f"* {row['test']} in {row['directory']}: {row['note']}" for row in result.rows if row.get("note")]


def _find_rate(result: Result, name: str, test: str, rate: str) -> float | None:
    return next(
        (
            number(row, rate)
            for row in result.rows
            if row["directory"] == name and row["test"] == test and row.get(rate)
        ),
        None,
    )


def draw(result: Result, path: Path) -> None:
    """Draw bars by test and directory: bytes per second, and operations per second."""
    names = directories(result)
    units = {"Bps": "bytes/s", "per_s": "operations/s"}
    # An interrupted bench may lack one of the units.
    rates = [rate for rate in units if any(row.get(rate) for row in result.rows)]
    with figure(path, 5.0 * max(1, len(rates)), 5.0) as drawn:
        panels = drawn.subplots(1, max(1, len(rates)), squeeze=False)[0]
        for axes, rate in zip(panels, rates, strict=False):
            axes.set_title(units[rate], loc="left")
            tests = list(dict.fromkeys(str(row["test"]) for row in result.rows if row.get(rate)))
            height = 0.8 / len(names)
            for index, name in enumerate(names):
                positions = [position + height * index for position in range(len(tests))]
                values = [_find_rate(result, name, test, rate) or 0.0 for test in tests]
                bars = axes.barh(
                    positions, values, height * 0.92, color=COLOURS[index % len(COLOURS)], label=name
                )
                axes.bar_label(
                    bars, [format_count(value) if value else "" for value in values], padding=3, fontsize=8
                )
            centres = [position + height * (len(names) - 1) / 2 for position in range(len(tests))]
            axes.set_yticks(centres, tests)
            axes.invert_yaxis()
            axes.set_xscale("log")
            axes.margins(x=0.2)
            axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)

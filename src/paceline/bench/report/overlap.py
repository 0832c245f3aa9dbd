"""Overlap with computation, as a table and as bars."""

from pathlib import Path

from rich.console import Console

from paceline.bench.report.bench import Column, build_table, three_digits
from paceline.bench.report.compute import format_rate, number
from paceline.bench.result import Result, Row
from paceline.plotting.figure import COLOURS, figure


def show(console: Console, result: Result) -> None:
    """Print a result."""
    console.print(
        build_table(
            result.rows,
            [
                Column("", row_name, right=False),
                Column("rate", lambda row: format_rate(row, "Bps")),
                Column("alone", lambda row: three_digits(number(row, "alone_s"))),
                Column("both", lambda row: three_digits(number(row, "median_s"))),
                Column("hidden", lambda row: f"{number(row, 'hidden'):.0%}"),
            ],
        )
    )


def row_name(row: Row) -> str:
    """Return operation, size, memory or back end, and streams of a row."""
    words = [f"{row['operation']}, {number(row, 'bytes') / 2**20:g} MiB"]
    words += [str(row[key]) for key in ("memory", "backend") if row.get(key)]
    return ", ".join(words) + (
        f", {row['streams']} stream{'s' * (row['streams'] != 1)}" if row.get("streams") else ""
    )


def draw(result: Result, path: Path) -> None:
    """Draw bars for each operation alone, and for both at once.

    If nothing is hidden, both at once take as long as one after the other.
    """
    with figure(path, 9.0, 1.2 + 0.6 * len(result.rows)) as drawn:
        axes = drawn.subplots()
        for position, row in enumerate(result.rows):
            whole = number(row, "alone_s") + number(row, "compute_s")
            parts = (
                ("alone", 0.0, "alone_s", COLOURS[0], 0.2),
                ("computing", number(row, "alone_s"), "compute_s", COLOURS[1], 0.2),
            )
            for label, left, field_name, colour, shift in parts:
                axes.barh(
                    position - shift,
                    number(row, field_name) / whole,
                    0.36,
                    left / whole,
                    color=colour,
                    label=label if not position else None,
                )
            both = number(row, "median_s") / whole
            axes.barh(
                position + 0.2,
                both,
                0.36,
                color=COLOURS[3],
                label="both at once" if not position else None,
            )
            axes.annotate(
                f"{number(row, 'hidden'):.0%} hidden" if number(row, "hidden") > 0 else "nothing hidden",
                (both, position + 0.2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(result.rows)), [row_name(row) for row in result.rows])
        axes.invert_yaxis()
        axes.set_xlabel("time, relative to one after the other")
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside upper left", ncols=3, frameon=False)

"""What goes on under computing, as a table and as bars."""

from pathlib import Path

from rich.console import Console

from paceline.bench.report.bench import Column, table, three_digits
from paceline.bench.report.compute import number, rate
from paceline.bench.result import Result, Row
from paceline.plotting.figure import COLOURS, figure


def show(console: Console, result: Result) -> None:
    console.print(
        table(
            result.rows,
            [
                Column("", name, right=False),
                Column("rate", lambda row: rate(row, "Bps")),
                Column("alone", lambda row: three_digits(number(row, "alone_s"))),
                Column("both", lambda row: three_digits(number(row, "median_s"))),
                Column("hidden", lambda row: f"{number(row, 'hidden'):.0%}"),
            ],
        )
    )


def name(row: Row) -> str:
    words = [f"{row['operation']}, {number(row, 'bytes') / 2**20:g} MiB"]
    words += [str(row[key]) for key in ("memory", "backend") if row.get(key)]
    return ", ".join(words) + (
        f", {row['streams']} stream{'s' * (row['streams'] != 1)}" if row.get("streams") else ""
    )


def draw(result: Result, path: Path) -> None:
    """Each alone, and both: where nothing is hidden both take as long as the one after the other."""
    with figure(path, 9.0, 1.2 + 0.6 * len(result.rows)) as drawn:
        axes = drawn.subplots()
        for place, row in enumerate(result.rows):
            whole = number(row, "alone_s") + number(row, "compute_s")
            parts = (
                ("alone", 0.0, "alone_s", COLOURS[0], 0.2),
                ("computing", number(row, "alone_s"), "compute_s", COLOURS[1], 0.2),
            )
            for label, left, field_name, colour, shift in parts:
                axes.barh(
                    place - shift,
                    number(row, field_name) / whole,
                    0.36,
                    left / whole,
                    color=colour,
                    label=label if not place else None,
                )
            both = number(row, "median_s") / whole
            axes.barh(place + 0.2, both, 0.36, color=COLOURS[3], label="both at once" if not place else None)
            axes.annotate(
                f"{number(row, 'hidden'):.0%} hidden" if number(row, "hidden") > 0 else "nothing hidden",
                (both, place + 0.2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(result.rows)), [name(row) for row in result.rows])
        axes.invert_yaxis()
        axes.set_xlabel("time, as a share of one after the other")
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside upper left", ncols=3, frameon=False)

"""Measured collectives as tables: times, bandwidths, wrong elements, and the α–β fits."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from paceline.bench.report.bench import Column, as_text, build_table, field
from paceline.bench.result import Result, Row
from paceline.units import format_bytes, several

DISPENSABLE = ("n", "p95", "min")  # columns that a narrow terminal does not show, in this order
MAX_WIDTH = 1000


def show(console: Console, result: Result) -> None:
    """Print a result."""
    settings = result.settings
    header = (
        f"{format_counts(settings['ranks'])} ranks, {settings['seconds']} s per row; "
        "algbw and busbw in GB/s (10⁹), as defined by nccl-tests"
    )
    console.print(header, style="dim", markup=False)
    keys = ("axis", "ranks", "dtype", "algorithm")
    differing = [name for name in keys if len({row.get(name) for row in result.rows}) > 1]
    varied = [field(name, name, right=False) for name in differing]
    columns = [ROW[0], *varied, *ROW[1:]]
    for title in DISPENSABLE:
        if console.is_terminal and _measure(console, _by_operation(result.rows, columns)) > console.width:
            columns = [column for column in columns if column.title != title]
    _print_whole(console, _by_operation(result.rows, columns))
    if result.summary:
        console.print(
            "\ntime = α + factor · S / β, with the factor of busbw; ± one standard error", style="dim"
        )
        _print_whole(console, build_table(result.summary, (FIT[0], *varied, *FIT[1:])))
    if num_wrong := sum(bool(row["wrong"]) for row in result.rows):
        message = f"WRONG elements in {several(num_wrong, 'row')} of {len(result.rows)}"
        console.print(message, style="bold red")


def _measure(console: Console, table: Table) -> int:
    """Return the number of characters that a table needs."""
    return Measurement.get(console, console.options.update(width=MAX_WIDTH), table).maximum


def _print_whole(console: Console, table: Table) -> None:
    """Print a table, if need be beyond the width: a number that is cut off is wrong."""
    width = console.width
    console.width = max(width, _measure(console, table))
    console.print(table, crop=False)
    console.width = width


def format_counts(ranks: Any) -> str:
    """Return the numbers of ranks of a result."""
    return ", ".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks)


def _by_operation(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Return a table with the name of each operation above its rows."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for name, group in groupby(rows, key=lambda row: row["operation"]):
        table.add_row(f"[bold]{name}[/bold]")
        for row in group:
            table.add_row(*(column.show(row) for column in columns))
    return table


def _size(row: Row) -> str:
    return "  " + format_bytes(float(row["bytes"] or 0)).replace(".0 ", " ") if row["bytes"] else "  —"


def _GBps(name: str) -> Column:
    return field(name, f"{name}_GBps", lambda value: f"{value:.3f}")


def _wrong(row: Row) -> str:
    return "ok" if not row["wrong"] else f"{row['wrong']:,} WRONG"


def _alpha(row: Row) -> str:
    error = row.get("alpha_error_s")
    return as_text("alpha_s", row["alpha_s"]) + (
        f" ± {as_text('alpha_s', error)}" if error is not None else ""
    )


def _beta(row: Row) -> str:
    value, error = row.get("beta_Bps"), row.get("beta_error_Bps")
    if not isinstance(value, float):
        return "—"
    return f"{value / 1e9:.3g}" + (f" ± {error / 1e9:.2g}" if isinstance(error, float) else "")


BACKEND, PLACE = field("back end", "backend", right=False), field("place", "place", right=False)
ROW = (
    Column("", _size, right=False),
    BACKEND,
    PLACE,
    field("min", "min_s"),
    field("median", "median_s"),
    field("p95", "p95_s"),
    field("n", "n"),
    _GBps("algbw"),
    _GBps("busbw"),
    Column("check", _wrong),
)
FIT = (
    field("", "operation", right=False),
    BACKEND,
    PLACE,
    Column("α", _alpha),
    Column("β, GB/s", _beta),
    field("misfit", "misfit", lambda value: f"{value:.0%}"),
)

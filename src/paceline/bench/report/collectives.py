"""Measured collectives as text: times, bandwidths and what came out wrong; what a call and what a byte costs."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from paceline.bench.report.bench import Column, as_text, field, table
from paceline.bench.result import Result, Row
from paceline.units import format_bytes


def show(console: Console, result: Result) -> None:
    asked = result.settings
    told = f"{asked['ranks']} ranks, {asked['seconds']} s a row; algbw and busbw in GB/s (10⁹), as nccl-tests has them"
    console.print(told, style="dim", markup=False)
    several = [name for name in ("axis", "ranks", "dtype") if len({row[name] for row in result.rows}) > 1]
    varied = [field(name, name, right=False) for name in several]
    console.print(_by_operation(result.rows, (ROW[0], *varied, *ROW[1:])))
    if result.summary:
        console.print(
            "\ntime = α + factor · S / β, with the factor of busbw; ± one standard error", style="dim"
        )
        console.print(table(result.summary, (FIT[0], *varied, *FIT[1:])))
    if bad := sum(bool(row["wrong"]) for row in result.rows):
        console.print(f"{bad} row{'s' * (bad > 1)} of {len(result.rows)} came out WRONG", style="bold red")


def _by_operation(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """The name of an operation stands above its rows."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        shown.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for name, group in groupby(rows, key=lambda row: row["operation"]):
        shown.add_row(f"[bold]{name}[/bold]")
        for row in group:
            shown.add_row(*(column.show(row) for column in columns))
    return shown


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

"""The levels of memory and network, as a table and as bars."""

from pathlib import Path

from rich.console import Console

from paceline.bench.report.bench import Column, build_table, three_digits
from paceline.bench.report.compute import number
from paceline.bench.result import Result, Row
from paceline.plotting.figure import figure
from paceline.units import format_bytes


def show(console: Console, result: Result) -> None:
    """Print a result."""
    columns = [
        Column("level", lambda row: str(row["level"]), right=False),
        Column("size", lambda row: format_bytes(number(row, "bytes")) if row["bytes"] else "—"),
        Column("GB/s", lambda row: _digits(number(row, "Bps") / 1e9) if row["Bps"] else "—"),
        Column("nominal", lambda row: _digits(nominal / 1e9) if (nominal := _nominal_Bps(row)) else "—"),
        Column("latency", _format_latency),
    ]
    console.print(build_table(result.rows, columns))


def _format_latency(row: Row) -> str:
    """Return the latency, in nanoseconds where microseconds would be small fractions."""
    if row["latency_s"] is None:
        return "—"
    latency_s = number(row, "latency_s")
    return f"{latency_s * 1e9:.0f} ns" if latency_s < 1e-6 else three_digits(latency_s)


def _nominal_Bps(row: Row) -> float | None:
    """Return the rate that a manufacturer names; rows of older results have none."""
    return number(row, "nominal_Bps") if row.get("nominal_Bps") else None


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(result: Result, path: Path) -> None:
    """Draw the bandwidths of all levels."""
    rows = [row for row in result.rows if row["Bps"] or _nominal_Bps(row)]
    names = [str(row["level"]) for row in rows]
    with figure(path) as drawn:
        axes = drawn.subplots()
        axes.barh(names, [number(row, "Bps") / 1e9 if row["Bps"] else 0.0 for row in rows], label="measured")
        nominal = [(_nominal_Bps(row) or 0.0) / 1e9 for row in rows]
        if any(nominal):
            axes.barh(names, nominal, fill=False, label="nominal")
            axes.legend(frameon=False)
        axes.set(xscale="log", xlabel="GB/s")
        axes.invert_yaxis()

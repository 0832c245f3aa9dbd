"""Measured rates of a device as tables and as a roofline plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.bench.report.bench import Column, build_table, field, three_digits
from paceline.bench.result import Result, Row
from paceline.plotting.figure import COLOURS, figure
from paceline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATMULS = ("matmul", "matmul 2:4")
MEMORY = ("copy", "triad")


def number(row: Row, name: str) -> float:
    """Return a field of a row as a number, 0 if it is absent."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def format_rate(row: Row, name: str = "flops") -> str:
    """Format a rate: `1.32 TFLOP/s`, `1.32 TOP/s` for integers, `1.32 TB/s` for the field Bps."""
    if name == "Bps":
        return f"{format_count(number(row, name))}B/s"
    return f"{format_count(number(row, name))}{'OP/s' if row.get('dtype') == 'int8' else 'FLOP/s'}"


def matmul_name(row: Row) -> str:
    """Return the number type of a product, with 2:4 if it is sparse."""
    return f"{row['dtype']}{' 2:4' if row['operation'] == 'matmul 2:4' else ''}"


def group_matmuls(result: Result) -> dict[str, list[Row]]:
    """Return the rows of products by number type."""
    matmuls: dict[str, list[Row]] = {}
    for row in result.rows:
        if row["operation"] in MATMULS:
            matmuls.setdefault(matmul_name(row), []).append(row)
    return matmuls


def show(console: Console, result: Result) -> None:
    """Print a result."""
    if result.summary:
        console.print(build_table(result.summary, BEST))
        console.print()
        console.print(_by_shape(result))
    others = [row for row in result.rows if row["operation"] not in MATMULS]
    if others:
        console.print()
        console.print(build_table(others, OTHERS))


BEST = [
    Column("product", matmul_name, right=False),
    Column("best", format_rate),
    Column("of published", lambda row: f"{number(row, 'peak_share'):.0%}" if row.get("peak_share") else "—"),
    field("at m×n×k", "shape", right=False),
    Column("typical", lambda row: format_rate(row, "typical_flops") if row.get("typical_flops") else "—"),
]
OTHERS = [
    Column(
        "",
        lambda row: " ".join(str(row[key]) for key in ("operation", "dtype", "kernel") if row.get(key)),
        right=False,
    ),
    field("shape", "shape", right=False),
    Column("rate", lambda row: _format_other_rate(row)),
    Column("time", lambda row: three_digits(number(row, "median_s"))),
    Column("spread", lambda row: f"{number(row, 'spread'):.0%}"),
]


def _format_other_rate(row: Row) -> str:
    if row.get("per_s"):
        return f"{number(row, 'per_s'):,.0f} samples/s"
    return format_rate(row, "Bps" if row["operation"] in MEMORY else "flops")


def _by_shape(result: Result) -> Table:
    by_type = group_matmuls(result)
    shapes = list(dict.fromkeys(row["shape"] for rows in by_type.values() for row in rows))
    cells = {(row["shape"], name): row for name, rows in by_type.items() for row in rows}

    def column(name: str) -> Column:
        return Column(
            name,
            lambda row: _format_giga(cells[row["shape"], name]) if (row["shape"], name) in cells else "—",
        )

    return build_table(
        [{"shape": shape} for shape in shapes],
        [field("GFLOP/s, m×n×k", "shape", right=False), *map(column, by_type)],
    )


def _format_giga(row: Row) -> str:
    flops = number(row, "flops")
    return f"{flops / 1e9:,.0f}" if flops >= 1e11 else f"{flops / 1e9:.3g}"


def bandwidth(result: Result) -> float | None:
    """Return the highest measured memory bandwidth, in bytes/s."""
    return max((number(row, "Bps") for row in result.rows if row["operation"] in MEMORY), default=None)


def draw(result: Result, path: Path) -> None:
    """Draw the measured roofline (Williams, Waterman and Patterson, Roofline, 2009)."""
    with figure(path, 9.0, 5.6) as drawn:
        axes = drawn.subplots()
        slope = bandwidth(result)
        by_type = group_matmuls(result)
        for colour, (name, rows) in zip(COLOURS, by_type.items(), strict=False):
            _draw_points(axes, name, rows, colour)
        if not by_type:
            axes.set_title("No matrix product was measured", loc="left")
            return
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        low, high = axes.get_xlim()
        tops: list[float] = []
        for colour, rows in zip(COLOURS, by_type.values(), strict=False):
            top = max(number(row, "flops") for row in rows)
            tops.append(top)
            begin = top / slope if slope else low
            axes.plot([max(low, begin), high], [top, top], color=colour, linewidth=1.2)
        if slope and tops:
            axes.plot([low, max(tops) / slope], [low * slope, max(tops)], color="#555555", linewidth=1.2)
            axes.annotate(
                f"memory: {format_count(slope)}B/s",
                (low * 1.3, low * 1.3 * slope),
                xytext=(12, -10),
                textcoords="offset points",
                color="#555555",
                fontsize=9,
            )
        axes.set_xlim(low, high)
        _label_tops(axes, list(zip(by_type, tops, strict=True)), high)
        axes.set_xlabel("FLOP per byte that must be moved")
        axes.set_ylabel("FLOP/s (int8: OP/s)")
        axes.set_title(f"Measured roofline: {result.settings.get('device', '')}", loc="left")
        axes.set_axisbelow(True)
        axes.grid(True, which="major", color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_points(axes: "Axes", name: str, rows: Sequence[Row], colour: str) -> None:
    axes.scatter(
        [number(row, "flop") / number(row, "bytes") for row in rows],
        [number(row, "flops") for row in rows],
        s=16,
        color=colour,
        label=name,
    )


def _label_tops(axes: "Axes", tops: list[tuple[str, float]], at: float) -> None:
    """Write the names at the right ends of the lines, without overlap."""
    shown = 0.0
    for colour, (name, top) in sorted(zip(COLOURS, tops, strict=False), key=lambda item: item[1][1]):
        shown = max(top, shown * 1.22)
        text = f"{name} {format_count(top)}{'OP/s' if name.startswith('int8') else 'FLOP/s'}"
        axes.annotate(
            text,
            (at, shown),
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )

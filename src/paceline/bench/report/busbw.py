"""Plot of measured collectives: bus bandwidth over size, with the fits."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.collectives.operations import ALL_OPERATIONS
from paceline.bench.report.collectives import format_counts
from paceline.bench.result import Result, Row
from paceline.errors import BenchError
from paceline.plotting.figure import COLOURS, figure
from paceline.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = (("o", "-"), ("^", "--"), ("s", ":"), ("D", "-."))  # markers and styles of lines
MAX_SIZES = 5  # labels of an axis, which must not touch


def draw(result: Result, path: Path) -> None:
    """Draw a panel for each operation, with points (measured) and a line (fitted) for each series.

    A series is a combination of back end, place, type and axis. Raises BenchError if there is nothing to
    draw.
    """
    rows = [row for row in result.rows if row.get("busbw_GBps")]
    if not rows:
        raise BenchError(
            "cannot draw bus bandwidth: no operation that sends data was measured; add one with --operations"
        )
    names = list(dict.fromkeys(str(row["operation"]) for row in rows))
    differing = [
        name
        for name in result.keys
        if name not in ("operation", "bytes") and len({row[name] for row in rows}) > 1
    ]
    series_keys = differing or ["backend"]
    series_names = dict.fromkeys(_series_name(row, series_keys) for row in rows)
    looks = dict(zip(series_names, cycle(_list_looks()), strict=False))
    columns = min(3, len(names))
    height = -(-len(names) // columns)
    with figure(path, 4.2 * columns + 0.4, 3.0 * height + 1.2) as drawn:
        panels = drawn.subplots(height, columns, squeeze=False)
        for unused in panels.flat[len(names) :]:
            unused.set_visible(False)
        for name, axes in zip(names, panels.flat, strict=False):
            for series, look in looks.items():
                measured, fits = (
                    [
                        row
                        for row in table
                        if row["operation"] == name and _series_name(row, series_keys) == series
                    ]
                    for table in (rows, result.summary)
                )
                _draw_series(axes, measured, fits, series, look)
            axes.set(title=name, yscale="log")
            axes.set_xscale("log", base=2)
            axes.xaxis.get_major_locator().set_params(numticks=MAX_SIZES)
            axes.xaxis.set_major_formatter(lambda size, _: format_bytes(size).replace(".0 ", " "))
            axes.grid(alpha=0.25)
        drawn.supylabel("busbw, GB/s (10⁹)")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawn.legend(
            handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False
        )
        ranks = f"{format_counts(result.settings.get('ranks'))} ranks, {result.machine.get('host')}"
        drawn.suptitle(
            f"{ranks}: median (points, down to the 95th percentile) and α + factor · S / β (lines)",
            fontsize="medium",
        )


def _list_looks() -> list[tuple[str, str, str]]:
    """Return colours, markers and styles of lines: another marker and style when all colours are used."""
    return [(colour, *shape) for shape in SHAPES for colour in COLOURS]


def _series_name(row: Row, keys: Sequence[str]) -> str:
    words: dict[Any, str] = {"in": "in place", "out": "out of place"}
    return ", ".join(
        f"{row[name]} ranks" if name == "ranks" else words.get(row[name], str(row[name])) for name in keys
    )


def _draw_series(
    axes: "Axes", rows: Sequence[Row], fits: Sequence[Row], series: str, look: tuple[str, str, str]
) -> None:
    if not rows:
        return
    colour, marker, line = look
    rows = sorted(rows, key=lambda row: _number(row["bytes"]))
    sizes, medians = [_number(row["bytes"]) for row in rows], [_number(row["busbw_GBps"]) for row in rows]
    down_to_p95 = [
        busbw * (1 - _number(row["median_s"]) / _number(row["p95_s"]))
        for busbw, row in zip(medians, rows, strict=True)
    ]
    axes.errorbar(
        sizes,
        medians,
        yerr=[down_to_p95, [0.0] * len(rows)],
        fmt=marker,
        markersize=3.5,
        linewidth=0.8,
        color=colour,
        label=series,
    )
    for fit in fits:
        factor = ALL_OPERATIONS[str(fit["operation"])].factor(int(_number(fit["ranks"])))
        points = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
        per_byte = factor / _number(fit["beta_Bps"]) if fit.get("beta_Bps") else 0.0
        axes.plot(
            points,
            [factor * size / (_number(fit["alpha_s"]) + per_byte * size) / 1e9 for size in points],
            lw=1,
            ls=line,
            color=colour,
        )


def _number(value: Any) -> float:
    return float(value)

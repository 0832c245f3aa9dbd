"""Draw figures as SVG. Colours are classes of the style sheet, so that a page can be light or dark."""

import math
import sys
from collections.abc import Sequence
from html import escape

from paceline.inspect.report.figures import BarFigure, Figure, Line
from paceline.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 34  # of the area of the axes
NUM_COLOURS = 8
MAX_LEGEND = 12
BAR_HEIGHT, BAR_GAP = 26, 10
Range = tuple[float, float]


def draw_lines(figure: Figure) -> str:
    """Return a figure of lines as an SVG element."""
    drawn = [line for line in figure.lines if any(value is not None for value in line.mean)]
    x_range = _find_range([line.x for line in drawn])
    y_range = _find_range([[*line.low, *line.high] for line in drawn], 0.05)
    parts = [
        f'<svg class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(figure.title)}">'
    ]
    parts += _draw_axes(figure, x_range, y_range)
    for line in drawn:
        parts += _draw_line(line, x_range, y_range)
    parts.append("</svg>")
    return "\n".join(parts)


def _find_range(values: Sequence[Sequence[float | None]], margin: float = 0.0) -> Range:
    """Return the range of finite values, widened if it is empty."""
    finite = [value for row in values for value in row if value is not None and math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low == high:
        half = abs(low) * 0.05 or 0.5
        return low - half, high + half
    # the difference of two huge values may overflow
    space, most = (high * margin) - (low * margin), sys.float_info.max
    return max(low - space, -most), min(high + space, most)


def _scale(value: float, of: Range, begin: float, end: float) -> float:
    span = of[1] / 2 - of[0] / 2
    return begin + (end - begin) * (((value / 2 - of[0] / 2) / span) if span else 0.5)


def _x(value: float, of: Range) -> float:
    return _scale(value, of, LEFT, WIDTH - RIGHT)


def _y(value: float, of: Range) -> float:
    return _scale(value, of, HEIGHT - BOTTOM, TOP)


def find_ticks(of: Range, count: int = 5) -> list[float]:
    """Return round values within a range, about `count` of them."""
    span = of[1] - of[0]
    if not 0 < span < math.inf:
        return []
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else raw
    size = next((power * factor for factor in (1, 2, 5) if power * factor >= raw * 0.999), power * 10)
    first = math.ceil(of[0] / size - 1e-9)
    return [at * size for at in range(first, math.floor(of[1] / size + 1e-9) + 1)]


def format_value(value: float, unit: str) -> str:
    """Return a value of an axis with its unit, without digits that say nothing."""
    if unit == "s":
        return format_seconds(value) if value else "0 s"
    if unit == "J":
        return f"{format_count(value)}J" if abs(value) >= 1000 else f"{value:.4g} J"
    if unit == "B":
        return format_bytes(value)
    text = format_count(value) if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def _draw_axes(figure: Figure, x_range: Range, y_range: Range) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in find_ticks(y_range):
        at = _y(value, y_range)
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        text = escape(format_value(value, figure.unit if figure.unit in ("s", "J", "B") else ""))
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value in find_ticks(x_range):
        at = _x(value, x_range)
        text = escape(format_value(value, figure.axis_unit))
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + right) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{escape(figure.axis)}</text>"
    )
    return parts


def _draw_line(line: Line, x_range: Range, y_range: Range) -> list[str]:
    colour = line.colour % NUM_COLOURS
    parts = []
    for part in _split_at_gaps(line):
        points = [(_x(line.x[at], x_range), at) for at in part]
        high = [f"{x:.1f},{_y(line.high[at] or 0.0, y_range):.1f}" for x, at in points]
        low = [f"{x:.1f},{_y(line.low[at] or 0.0, y_range):.1f}" for x, at in points]
        mean = [f"{x:.1f},{_y(line.mean[at] or 0.0, y_range):.1f}" for x, at in points]
        if high != low:
            parts.append(f'<polygon class="band f{colour}" points="{" ".join([*high, *reversed(low)])}"/>')
        if len(mean) == 1:
            x, _, y = mean[0].partition(",")
            parts.append(f'<circle class="f{colour}" cx="{x}" cy="{y}" r="2.5"/>')
        else:
            parts.append(f'<polyline class="line s{colour}" points="{" ".join(mean)}"/>')
    return parts


def _split_at_gaps(line: Line) -> list[list[int]]:
    """Return the indices of the points by stretch without missing or infinite values."""
    parts: list[list[int]] = [[]]
    for at, value in enumerate(line.mean):
        if value is not None and math.isfinite(value) and math.isfinite(line.x[at]):
            parts[-1].append(at)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def draw_bars(figure: BarFigure) -> str:
    """Return stacked bars, one for each row, of the parts of each row, with a legend."""
    rows, unit = figure.rows, figure.unit
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    total = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    legend_rows = -(-len(names) // 2)
    height = len(rows) * (BAR_HEIGHT + BAR_GAP) + 18 * legend_rows + 12
    left, width = 96, 420
    parts = [
        f'<svg class="figure bars" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-label="{escape(figure.title)}">'
    ]
    for at, (label, values) in enumerate(rows.items()):
        top, begin = at * (BAR_HEIGHT + BAR_GAP), float(left)
        text = escape(label if len(label) <= 14 else label[:13] + "…")
        parts.append(f'<text class="tick" x="{left - 8}" y="{top + 17}" text-anchor="end">{text}</text>')
        for name, value in values.items():
            size = (width - left - 4) * value / total if total > 0 and value > 0 else 0.0
            if size > 0:
                colour = names.index(name) % NUM_COLOURS
                hint = f"{label}, {name}: {format_value(value, unit)}, {value / sum(values.values()):.0%}"
                parts.append(
                    f'<rect class="bar f{colour}" x="{begin:.2f}" y="{top}" width="{size:.2f}" '
                    f'height="{BAR_HEIGHT}"><title>{escape(hint)}</title></rect>'
                )
            begin += size
    for at, name in enumerate(names):
        x, y = 8 + (at % 2) * 210, len(rows) * (BAR_HEIGHT + BAR_GAP) + 18 * (at // 2) + 10
        parts.append(f'<rect class="f{at % NUM_COLOURS}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        first = next(iter(rows.values())).get(name)
        text = escape(f"{name} {format_value(first, unit)}" if first is not None else name)
        parts.append(f'<text class="tick" x="{x + 16}" y="{y}">{text}</text>')
    parts.append("</svg>")
    return "\n".join(parts)

"""The picture of how a training scales: throughput and efficiency over ranks, and cost over duration."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.plan.search.scaling import Scaling, ScalingPoint, find_last_efficient
from paceline.plotting.colours import STRONG, WEAK
from paceline.plotting.figure import figure
from paceline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MAX_LABELED = 100  # an axis that ends at a smaller multiple of its begin has labels at 1, 2 and 5
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw(scaling: Scaling, efficiency: float, path: Path) -> None:
    """Draw three charts: throughput over ranks, efficiency over ranks, and cost over duration.

    The throughput is drawn next to ideal scaling from the smallest number of ranks. The cost is device-
    hours, or money if a price is known; the duration is that of the training, or of a step if no length is
    given. efficiency: the requested minimum. path: an SVG or PNG file.
    """
    with figure(path, 14.0, 4.6) as canvas:
        left, middle, right = canvas.subplots(1, 3)
        _draw_throughput(left, scaling)
        _draw_efficiency(middle, scaling, efficiency)
        _draw_costs(right, scaling)
        name = f"{scaling.facts.name} on {scaling.cluster.device.name}"
        per_rank = f"{float(scaling.each):,.4g} sample{'s' * (scaling.each > 1)} per rank"
        canvas.suptitle(
            f"{name}: strong, a batch of {scaling.batch:,}; weak, {per_rank};"
            " bands are one standard deviation",
            fontsize="medium",
        )


def _curves(scaling: Scaling) -> tuple[tuple[Sequence[ScalingPoint], str, str, str], ...]:
    return (scaling.weak.points, "weak", WEAK, "s"), (scaling.strong.points, "strong", STRONG, "o")


def _draw_throughput(axes: "Axes", scaling: Scaling) -> None:
    _draw_over_ranks(axes, scaling, lambda point: point.cost.time.tokens_per_s)
    first, last = (
        scaling.strong.points[0],
        max(point.ranks for points, *_ in _curves(scaling) for point in points),
    )
    rate = first.cost.time.tokens_per_s
    axes.plot(
        [first.ranks, last],
        [rate, rate * last / first.ranks],
        linestyle="--",
        color="0.45",
        linewidth=1,
        label="ideal",
    )
    axes.set_yscale("log")
    _label_ticks(axes.yaxis, format_count)
    axes.set(ylabel="tokens/s" if scaling.facts.tokens > 1 else "samples/s", title="throughput")
    axes.legend(frameon=False)


def _draw_efficiency(axes: "Axes", scaling: Scaling, requested: float) -> None:
    _draw_over_ranks(axes, scaling, lambda point: point.efficiency)
    axes.axhline(1.0, linestyle="--", color="0.45", linewidth=1)
    axes.axhline(requested, linestyle=":", color="0.45", linewidth=1)
    best = find_last_efficient(scaling.strong, requested)
    axes.plot(
        [best.ranks],
        [best.efficiency],
        marker="o",
        markersize=12,
        fillstyle="none",
        color=STRONG,
        linestyle="none",
        label=f"recommended: {best.ranks:,}",
    )
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.2))
    axes.legend(
        *([entries[-1]] for entries in axes.get_legend_handles_labels()), frameon=False, loc="lower left"
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(title=f"efficiency, and the requested {requested:.0%}")


def _draw_over_ranks(axes: "Axes", scaling: Scaling, value: Callable[[ScalingPoint], float]) -> None:
    """Draw a value of both curves over the ranks, with bands of one standard deviation."""
    for points, label, colour, mark in _curves(scaling):
        ranks, values = [point.ranks for point in points], [value(point) for point in points]
        errors = [point.cost.time.error for point in points]
        low, high = (
            [mean * (1 + sign * error) for mean, error in zip(values, errors, strict=True)]
            for sign in (-1, 1)
        )
        axes.fill_between(ranks, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(ranks, values, marker=mark, markersize=4.5, color=colour, label=label)
    ticks = sorted({point.ranks for points, *_ in _curves(scaling) for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks[:: -(-len(ticks) // 9)])
    axes.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
    axes.minorticks_off()
    axes.set(xlabel="ranks")
    axes.margins(x=0.07)
    axes.grid(alpha=0.25)


def _draw_costs(axes: "Axes", scaling: Scaling) -> None:
    """Draw the cost over the duration of a training or a step, with the number of ranks at each point."""
    points = [point for points, *_ in _curves(scaling) for point in points]
    unit, unit_s = next(((unit, s) for unit, s in UNITS if min(map(_seconds, points)) >= s), UNITS[-1])
    has_price = all(point.bill is not None and point.bill.price is not None for point in points)
    is_whole_training = scaling.tokens is not None
    costs = [_cost(point, has_price) for point in points]
    for curve, _, colour, mark in _curves(scaling):
        times = [_seconds(point) / unit_s for point in curve]
        axes.plot(
            times, [_cost(point, has_price) for point in curve], marker=mark, markersize=4.5, color=colour
        )
    axes.set_xscale("log")
    if max(costs) > 8 * min(costs):
        axes.set_yscale("log")
        axes.margins(x=0.12, y=0.12)
    else:
        axes.margins(x=0.12)
        axes.set_ylim(0, 1.15 * max(costs))
    _label_ticks(axes.xaxis, lambda time: f"{time:,g}")
    _label_ticks(axes.yaxis, format_count)
    labels: list[tuple[float, float]] = []
    for curve, _, colour, _ in reversed(_curves(scaling)):
        for point in curve:
            _label_point(
                axes,
                f"{point.ranks:,}",
                (_seconds(point) / unit_s, _cost(point, has_price)),
                colour,
                colour == STRONG,
                labels,
            )
    quantity = "device-hours" if is_whole_training else "device-seconds"
    if has_price and points[0].bill is not None:
        quantity = f"price ({points[0].bill.currency})"
    axes.set(
        xlabel=f"{unit} of {'the training' if is_whole_training else 'a step'}",
        ylabel=quantity,
        title=f"{quantity} over time, by ranks",
    )
    axes.grid(alpha=0.25)


def _label_ticks(axis: "Axis", format_value: Callable[[float], str]) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_major_formatter(lambda value, _: format_value(value))
    axis.set_minor_formatter(lambda *_: "")
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and high < MAX_LABELED * low:  # perhaps without any power of ten
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _label_point(
    axes: "Axes",
    text: str,
    point: tuple[float, float],
    colour: str,
    is_above: bool,
    labels: list[tuple[float, float]],
) -> None:
    """Label a point, unless the label would overlap with a label in `labels`, to which it is added."""
    offset = (4, 5) if is_above else (-4, -13)
    x, y = axes.transData.transform(point)
    place = x + offset[0], y + offset[1]
    if any(abs(place[0] - other[0]) < 26 and abs(place[1] - other[1]) < 11 for other in labels):
        return
    labels.append(place)
    axes.annotate(
        text,
        point,
        xytext=offset,
        textcoords="offset points",
        ha="left" if is_above else "center",
        fontsize=7.5,
        color=colour,
    )


def _seconds(point: ScalingPoint) -> float:
    return point.bill.seconds if point.bill is not None else point.cost.step_s


def _cost(point: ScalingPoint, has_price: bool) -> float:
    if point.bill is None:
        return point.cost.step_s * point.ranks
    return point.bill.price or 0.0 if has_price else point.bill.device_hours

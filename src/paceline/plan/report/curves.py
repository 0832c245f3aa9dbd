"""The picture of how a training scales: throughput and efficiency over ranks, and what it costs over how long it takes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.plan.search.scaling import Scaling, ScalingPoint, find_last_efficient
from paceline.plotting.colours import STRONG, WEAK
from paceline.plotting.figure import figure
from paceline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw(found: Scaling, efficiency: float, path: Path) -> None:
    """Throughput over ranks, beside what they would do at the pace of the fewest; efficiency, and what is asked of it; over the time that
    the training takes (a step, where nobody says how long that is) the devices' hours, or money where there is a price."""
    with figure(path, 14.0, 4.6) as drawn:
        left, middle, right = drawn.subplots(1, 3)
        _throughput(left, found)
        _efficiency(middle, found, efficiency)
        _costs(right, found)
        name = f"{found.facts.name} on {found.cluster.device.name}"
        of_rank = f"{float(found.each):,.4g} sample{'s' * (found.each > 1)} a rank"
        drawn.suptitle(
            f"{name}: strong, a batch of {found.batch:,}; weak, {of_rank}; bands are one standard deviation",
            fontsize="medium",
        )


def _curves(found: Scaling) -> tuple[tuple[Sequence[ScalingPoint], str, str, str], ...]:
    return (found.weak.points, "weak", WEAK, "s"), (found.strong.points, "strong", STRONG, "o")


def _throughput(field: "Axes", found: Scaling) -> None:
    _over_ranks(field, found, lambda point: point.cost.time.tokens_per_s)
    first, last = (
        found.strong.points[0],
        max(point.ranks for points, *_ in _curves(found) for point in points),
    )
    rate = first.cost.time.tokens_per_s
    field.plot(
        [first.ranks, last],
        [rate, rate * last / first.ranks],
        linestyle="--",
        color="0.45",
        linewidth=1,
        label="ideal",
    )
    field.set_yscale("log")
    field.yaxis.set_major_formatter(lambda rate, _: format_count(rate))
    field.set(ylabel="tokens/s" if found.facts.tokens > 1 else "samples/s", title="throughput")
    field.legend(frameon=False)


def _efficiency(field: "Axes", found: Scaling, asked: float) -> None:
    _over_ranks(field, found, lambda point: point.efficiency)
    field.axhline(1.0, linestyle="--", color="0.45", linewidth=1)
    field.axhline(asked, linestyle=":", color="0.45", linewidth=1)
    best = find_last_efficient(found.strong, asked)
    at = [best.ranks], [best.efficiency]
    field.plot(
        *at,
        marker="o",
        markersize=12,
        fillstyle="none",
        color=STRONG,
        linestyle="none",
        label=f"ask for {best.ranks:,}",
    )
    field.set_ylim(0, max(field.get_ylim()[1], 1.2))
    field.legend(
        *([found[-1]] for found in field.get_legend_handles_labels()), frameon=False, loc="lower left"
    )
    field.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    field.set(title=f"efficiency, and the {asked:.0%} asked for")


def _over_ranks(field: "Axes", found: Scaling, value: Callable[[ScalingPoint], float]) -> None:
    for points, label, colour, mark in _curves(found):
        ranks, values = [point.ranks for point in points], [value(point) for point in points]
        errors = [point.cost.time.error for point in points]
        low, high = (
            [one * (1 + sign * error) for one, error in zip(values, errors, strict=True)] for sign in (-1, 1)
        )
        field.fill_between(ranks, low, high, color=colour, alpha=0.2, linewidth=0)
        field.plot(ranks, values, marker=mark, markersize=4.5, color=colour, label=label)
    ticks = sorted({point.ranks for points, *_ in _curves(found) for point in points})
    field.set_xscale("log", base=2)
    field.set_xticks(ticks[:: -(-len(ticks) // 9)])
    field.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
    field.minorticks_off()
    field.set(xlabel="ranks")
    field.margins(x=0.07)
    field.grid(alpha=0.25)


def _costs(field: "Axes", found: Scaling) -> None:
    points = [point for points, *_ in _curves(found) for point in points]
    unit, unit_s = next(((unit, s) for unit, s in UNITS if min(map(_seconds, points)) >= s), UNITS[-1])
    priced, whole = (
        all(point.bill is not None and point.bill.price is not None for point in points),
        found.tokens is not None,
    )
    costs = [_cost(point, priced) for point in points]
    for of_curve, _, colour, mark in _curves(found):
        times = [_seconds(point) / unit_s for point in of_curve]
        field.plot(
            times, [_cost(point, priced) for point in of_curve], marker=mark, markersize=4.5, color=colour
        )
    field.set_xscale("log")
    if max(costs) > 8 * min(costs):
        field.set_yscale("log")
        field.margins(x=0.12, y=0.12)
    else:
        field.margins(x=0.12)
        field.set_ylim(0, 1.15 * max(costs))
    for axis, say in (
        (field.xaxis, lambda time, _: f"{time:,g}"),
        (field.yaxis, lambda cost, _: format_count(cost)),
    ):
        axis.set_major_formatter(say)
        axis.set_minor_formatter(lambda *_: "")
    named: list[tuple[float, float]] = []
    for of_curve, _, colour, _ in reversed(_curves(found)):
        for point in of_curve:
            _name(
                field,
                f"{point.ranks:,}",
                (_seconds(point) / unit_s, _cost(point, priced)),
                colour,
                colour == STRONG,
                named,
            )
    what = "price" if priced else "device-hours" if whole else "device-seconds"
    field.set(
        xlabel=f"{unit} of {'the training' if whole else 'a step'}",
        ylabel=what,
        title=f"{what} over time, by ranks",
    )
    field.grid(alpha=0.25)


def _name(
    field: "Axes",
    text: str,
    at: tuple[float, float],
    colour: str,
    above: bool,
    named: list[tuple[float, float]],
) -> None:
    """Unless a name stands there."""
    offset = (4, 5) if above else (-4, -13)
    x, y = field.transData.transform(at)
    place = x + offset[0], y + offset[1]
    if any(abs(place[0] - other[0]) < 26 and abs(place[1] - other[1]) < 11 for other in named):
        return
    named.append(place)
    field.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha="left" if above else "center",
        fontsize=7.5,
        color=colour,
    )


def _seconds(point: ScalingPoint) -> float:
    return point.bill.seconds if point.bill is not None else point.cost.step_s


def _cost(point: ScalingPoint, priced: bool) -> float:
    if point.bill is None:
        return point.cost.step_s * point.ranks
    return point.bill.price or 0.0 if priced else point.bill.device_hours

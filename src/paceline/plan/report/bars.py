"""The picture of predicted plans: what their time and memory go into, and which of all that fit nothing beats in both."""

from collections.abc import Sequence
from math import hypot, log
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.plan.cost_model.cost import Cost, CostPart
from paceline.plan.plan import Plan
from paceline.plan.report.plan import heading
from paceline.plan.search.best_plans import BestPlans
from paceline.plan.search.search import MARGIN
from paceline.plotting.colours import STRONG, WEAK, colour
from paceline.plotting.figure import figure
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
FRONT = 8  # plans of it that are named; it often goes on with very slow ones
CLOSE = 0.06  # of the front's width and height: names of plans nearer than that would overlap
FAR = 12.0  # times the largest bar: a limit beyond that is not drawn to scale
SLOWEST = 3.0  # times the slowest of the front: what is slower is not shown
LIMIT = "#b2182b"
OPTIONS_A_LINE = 44  # characters of a plan's name beside its bar


def draw(found: BestPlans, top: int, path: Path) -> None:
    """Above: the best plans, as stacked bars. Below, where there are several: all that fit by memory and time, and the front of them."""
    asked = [plan.resolve(found.ranks) for plan, _ in found.plans]
    plans = [*found.plans, *(pair for pair in found.others or () if pair[0] not in asked)][:top]
    bars, below = 2.6 + 0.4 * len(plans), 4.2 if len(found.pool) > 1 else 0.0
    with figure(path, 14.0, bars + below) as drawn:
        rows = drawn.add_gridspec(2 if below else 1, 1, height_ratios=(bars, below) if below else None)
        _bars(drawn.add_subfigure(rows[0]), plans)
        if below:
            _front(drawn.add_subfigure(rows[1]), found)
        drawn.suptitle(heading(found), fontsize="medium")


def front(pool: Sequence[tuple[Plan, Cost]]) -> list[tuple[Plan, Cost]]:
    """Of plans, fastest first, those with less memory than all that are as fast or faster."""
    found: list[tuple[Plan, Cost]] = []
    for plan, cost in pool:
        if not found or cost.peak_bytes < found[-1][1].peak_bytes:
            found.append((plan, cost))
    return found


def _bars(drawn: "SubFigure", plans: Sequence[tuple[Plan, Cost]]) -> None:
    """Each half has its parts told below it."""
    from matplotlib.patches import Patch

    columns = drawn.add_gridspec(1, 2, width_ratios=(1.25, 1.0))
    halves = [drawn.add_subfigure(columns[0]), drawn.add_subfigure(columns[1])]
    left, right = (half.add_subplot() for half in halves)
    unit, name = _scale(plans[0][1].step_s)
    limit, most = plans[0][1].memory.limit_bytes, max(cost.peak_bytes for _, cost in plans)
    of_memory, GiB = _memory_scale(most)
    _stacked(left, [cost.time.parts for _, cost in plans], unit)
    _stacked(right, [cost.memory.parts for _, cost in plans], of_memory)
    for at, (_, cost) in enumerate(plans):
        for field, value, error in (
            (left, cost.step_s / unit, cost.time.error),
            (right, cost.peak_bytes / of_memory, cost.memory.error),
        ):
            field.errorbar(value, at, xerr=error * value, color="0.2", capsize=2.5, linewidth=1)
    if most > limit / FAR:
        right.axvline(
            limit / of_memory, color=LIMIT, linewidth=1.5, label=f"the device's {format_bytes(limit)}"
        )
        right.axvline(
            limit / of_memory * (1 - MARGIN),
            color=LIMIT,
            linewidth=1,
            linestyle="--",
            label=f"less {MARGIN:.0%}",
        )
    else:
        right.plot([], [], color=LIMIT, linewidth=1.5, label=f"far right: {format_bytes(limit)}")
    left.set_yticks(range(len(plans)), [_folded(str(plan)) for plan, _ in plans], fontsize=8)
    left.set(xlabel=f"{name} of a step", title="time, ± one standard deviation")
    right.set_yticks([])
    right.set(xlabel=f"{GiB} of the fullest rank", title="memory, ± one standard deviation")
    told = [field.get_legend_handles_labels() for field in (left, right)]
    for half, field, (handles, labels) in zip(halves, (left, right), told, strict=True):
        field.set_ylim(len(plans) - 0.4, -0.6)
        field.set_xlim(left=0)
        field.grid(axis="x", alpha=0.25)
        field.set_axisbelow(True)
        nothing = [Patch(alpha=0.0)] * (
            max(len(names) for _, names in told) - len(labels)
        )  # so that both halves are as high
        half.legend(
            [*handles, *nothing],
            [*labels, *("" for _ in nothing)],
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            frameon=False,
        )


def _scale(seconds: float) -> tuple[float, str]:
    return next(((unit, name) for unit, name in SCALES if seconds >= unit), SCALES[-1])


def _memory_scale(most_bytes: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if most_bytes > 2**29 else (2.0**20, "MiB")


def _stacked(field: "Axes", rows: Sequence[Sequence[CostPart]], unit: float) -> None:
    """A bar of parts for each plan; parts in the order of the first plan that has them."""
    names = list(dict.fromkeys(part.name for parts in rows for part in parts if part.value))
    starts = [0.0] * len(rows)
    for name in names:
        widths = [sum(part.value for part in parts if part.name == name) / unit for parts in rows]
        field.barh(
            range(len(rows)),
            widths,
            left=starts,
            height=0.72,
            color=colour(name),
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]


def _front(drawn: "SubFigure", found: BestPlans) -> None:
    """All that fit, and a number for each of the front, which the list beside tells."""
    field, beside = drawn.subplots(1, 2, width_ratios=(1.0, 0.9))
    best = front(found.pool)
    unit, name = _scale(best[0][1].step_s)
    of_memory, GiB = _memory_scale(best[0][1].peak_bytes)
    highest = SLOWEST * best[-1][1].step_s
    slower = sum(cost.step_s > highest for _, cost in found.pool)

    def places(plans: Sequence[tuple[Plan, Cost]]) -> tuple[list[float], list[float]]:
        return [cost.peak_bytes / of_memory for _, cost in plans], [cost.step_s / unit for _, cost in plans]

    many = f"{len(found.pool):,} plans that fit" + (f" ({slower:,} are slower than this)" if slower else "")
    field.plot(*places(found.pool), ".", markersize=3, color="0.72", label=many)
    field.step(*places(best), where="post", color=STRONG, linewidth=1)
    field.plot(*places(best), "o", markersize=4.5, color=STRONG, label="nothing is both faster and leaner")
    if found.others is not None:
        field.plot(*places(found.plans), "D", markersize=7, color=WEAK, label="the one asked for")
        highest = max(highest, 1.1 * found.plans[0][1].step_s)
    lines = []
    for number, (plan, cost) in enumerate(_spread(best), 1):
        at = cost.peak_bytes / of_memory, cost.step_s / unit
        field.annotate(
            str(number),
            at,
            xytext=(-5, -11),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=STRONG,
        )
        lines.append(f"{number}  {format_seconds(cost.step_s)}, {format_bytes(cost.peak_bytes)}\n    {plan}")
    field.set_yscale("log")
    field.set_ylim(0.85 * best[0][1].step_s / unit, highest / unit)
    field.yaxis.set_major_formatter(lambda time, _: f"{time:,g}")
    field.yaxis.set_minor_formatter(lambda time, _: f"{time:,g}" if f"{time:e}"[0] in "235" else "")
    field.set(xlabel=f"{GiB} of the fullest rank", ylabel=f"{name} of a step", title="all that fit")
    field.grid(alpha=0.25, which="both")
    field.legend(fontsize=8, loc="upper right")
    beside.axis("off")
    beside.text(0, 1, "\n".join(lines), va="top", fontsize=8, transform=beside.transAxes, linespacing=1.35)


def _spread(best: Sequence[tuple[Plan, Cost]]) -> list[tuple[Plan, Cost]]:
    """So many of the front as can be named, each as far from the others as may be in the picture: the first and the last among them."""
    ends = best[0][1], best[-1][1]
    wide, high = ends[0].peak_bytes - ends[1].peak_bytes or 1.0, log(ends[1].step_s / ends[0].step_s) or 1.0
    places = [(cost.peak_bytes / wide, log(cost.step_s) / high) for _, cost in best]
    chosen = sorted({0, len(best) - 1})
    while len(chosen) < min(FRONT, len(best)):
        apart = [min(hypot(x - places[at][0], y - places[at][1]) for at in chosen) for x, y in places]
        if max(apart) < CLOSE:
            break
        chosen.append(apart.index(max(apart)))
    return [best[at] for at in sorted(chosen)]


def _folded(name: str) -> str:
    """A long name in lines, cut at its commas."""
    lines = [""]
    for option in name.split(","):
        if lines[-1] and len(lines[-1]) + len(option) > OPTIONS_A_LINE:
            lines.append("")
        lines[-1] += f"{option},"
    return "\n".join(lines)[:-1]

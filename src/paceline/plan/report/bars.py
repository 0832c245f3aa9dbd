"""The picture of predicted plans: their time and memory by part, and the Pareto front of all that fit."""

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
MAX_NAMED = 8  # plans of the front that are named; the front often ends with very slow plans
MIN_DISTANCE = 0.06  # fraction of the front's width and height: closer names would overlap
MAX_LIMIT = 12.0  # times the largest bar: a higher limit is not drawn to scale
SLOWEST = 3.0  # times the slowest plan of the front: slower plans are not shown
LIMIT = "#b2182b"
MAX_LINE = 44  # characters of a plan's name next to its bar


def draw(results: BestPlans, top: int, path: Path) -> None:
    """Draw the best plans as stacked bars, and below them all plans that fit, with the Pareto front.

    The second part is left out if only one plan fits. top: number of bars. path: an SVG or PNG file.
    """
    named = [plan.resolve(results.ranks) for plan, _ in results.plans]
    plans = [*results.plans, *(pair for pair in results.others or () if pair[0] not in named)][:top]
    bars_height, front_height = 2.6 + 0.4 * len(plans), 4.2 if len(results.pool) > 1 else 0.0
    with figure(path, 14.0, bars_height + front_height) as canvas:
        rows = canvas.add_gridspec(
            2 if front_height else 1, 1, height_ratios=(bars_height, front_height) if front_height else None
        )
        _draw_bars(canvas.add_subfigure(rows[0]), plans)
        if front_height:
            _draw_front(canvas.add_subfigure(rows[1]), results)
        canvas.suptitle(heading(results), fontsize="medium")


def find_front(pool: Sequence[tuple[Plan, Cost]]) -> list[tuple[Plan, Cost]]:
    """Return the Pareto front: the plans that need less memory than all plans that are as fast or faster.

    pool: plans, fastest first.
    """
    front: list[tuple[Plan, Cost]] = []
    for plan, cost in pool:
        if not front or cost.peak_bytes < front[-1][1].peak_bytes:
            front.append((plan, cost))
    return front


def _draw_bars(canvas: "SubFigure", plans: Sequence[tuple[Plan, Cost]]) -> None:
    """Draw the time of the plans in the left half, their memory in the right half, with legends below."""
    from matplotlib.patches import Patch

    columns = canvas.add_gridspec(1, 2, width_ratios=(1.25, 1.0))
    halves = [canvas.add_subfigure(columns[0]), canvas.add_subfigure(columns[1])]
    left, right = (half.add_subplot() for half in halves)
    time_unit, time_name = _time_scale(plans[0][1].step_s)
    limit, peak = plans[0][1].memory.limit_bytes, max(cost.peak_bytes for _, cost in plans)
    memory_unit, memory_name = _memory_scale(peak)
    _stack_bars(left, [cost.time.parts for _, cost in plans], time_unit)
    _stack_bars(right, [cost.memory.parts for _, cost in plans], memory_unit)
    for row, (_, cost) in enumerate(plans):
        for axes, value, error in (
            (left, cost.step_s / time_unit, cost.time.error),
            (right, cost.peak_bytes / memory_unit, cost.memory.error),
        ):
            axes.errorbar(value, row, xerr=error * value, color="0.2", capsize=2.5, linewidth=1)
    if peak > limit / MAX_LIMIT:
        right.axvline(
            limit / memory_unit, color=LIMIT, linewidth=1.5, label=f"device memory: {format_bytes(limit)}"
        )
        right.axvline(
            limit / memory_unit * (1 - MARGIN),
            color=LIMIT,
            linewidth=1,
            linestyle="--",
            label=f"minus {MARGIN:.0%}",
        )
    else:
        right.plot([], [], color=LIMIT, linewidth=1.5, label=f"off scale: {format_bytes(limit)}")
    left.set_yticks(range(len(plans)), [_wrap_name(str(plan)) for plan, _ in plans], fontsize=8)
    left.set(xlabel=f"{time_name} per step", title="time, ± one standard deviation")
    right.set_yticks([])
    right.set(xlabel=f"{memory_name} of the rank with peak memory", title="memory, ± one standard deviation")
    legends = [axes.get_legend_handles_labels() for axes in (left, right)]
    for half, axes, (handles, labels) in zip(halves, (left, right), legends, strict=True):
        axes.set_ylim(len(plans) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        # Empty entries give both legends the same height.
        padding = [Patch(alpha=0.0)] * (max(len(names) for _, names in legends) - len(labels))
        half.legend(
            [*handles, *padding],
            [*labels, *("" for _ in padding)],
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            frameon=False,
        )


def _time_scale(seconds: float) -> tuple[float, str]:
    return next(((unit, name) for unit, name in SCALES if seconds >= unit), SCALES[-1])


def _memory_scale(peak_bytes: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if peak_bytes > 2**29 else (2.0**20, "MiB")


def _stack_bars(axes: "Axes", rows: Sequence[Sequence[CostPart]], unit: float) -> None:
    """Draw a bar for each plan, divided into its parts in the order of the first plan that has them."""
    names = list(dict.fromkeys(part.name for parts in rows for part in parts if part.value))
    starts = [0.0] * len(rows)
    for name in names:
        widths = [sum(part.value for part in parts if part.name == name) / unit for parts in rows]
        axes.barh(
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


def _draw_front(canvas: "SubFigure", results: BestPlans) -> None:
    """Draw all plans that fit, with a number at each plan of the front, and a list of these numbers."""
    axes, text_axes = canvas.subplots(1, 2, width_ratios=(1.0, 0.9))
    front = find_front(sorted(results.pool, key=lambda pair: (pair[1].step_s, pair[1].peak_bytes)))
    time_unit, time_name = _time_scale(front[0][1].step_s)
    memory_unit, memory_name = _memory_scale(front[0][1].peak_bytes)
    highest = SLOWEST * front[-1][1].step_s
    slower = sum(cost.step_s > highest for _, cost in results.pool)

    def points(plans: Sequence[tuple[Plan, Cost]]) -> tuple[list[float], list[float]]:
        return (
            [cost.peak_bytes / memory_unit for _, cost in plans],
            [cost.step_s / time_unit for _, cost in plans],
        )

    label = f"{len(results.pool):,} plans that fit" + (
        f" ({slower:,} slower ones not shown)" if slower else ""
    )
    axes.plot(*points(results.pool), ".", markersize=3, color="0.72", label=label)
    axes.step(*points(front), where="post", color=STRONG, linewidth=1)
    axes.plot(*points(front), "o", markersize=4.5, color=STRONG, label="no plan is both faster and smaller")
    if results.others is not None:
        axes.plot(*points(results.plans), "D", markersize=7, color=WEAK, label="requested plan")
        highest = max(highest, 1.1 * results.plans[0][1].step_s)
    lines = []
    for number, (plan, cost) in enumerate(_spread(front), 1):
        axes.annotate(
            str(number),
            (cost.peak_bytes / memory_unit, cost.step_s / time_unit),
            xytext=(-5, -11),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=STRONG,
        )
        lines.append(f"{number}  {format_seconds(cost.step_s)}, {format_bytes(cost.peak_bytes)}\n    {plan}")
    axes.set_yscale("log")
    axes.set_ylim(0.85 * front[0][1].step_s / time_unit, highest / time_unit)
    axes.yaxis.set_major_formatter(lambda time, _: f"{time:,g}")
    axes.yaxis.set_minor_formatter(lambda time, _: f"{time:,g}" if f"{time:e}"[0] in "235" else "")
    axes.set(
        xlabel=f"{memory_name} of the rank with peak memory",
        ylabel=f"{time_name} per step",
        title="all plans that fit",
    )
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=8, loc="upper right")
    text_axes.axis("off")
    text_axes.text(
        0, 1, "\n".join(lines), va="top", fontsize=8, transform=text_axes.transAxes, linespacing=1.35
    )


def _spread(front: Sequence[tuple[Plan, Cost]]) -> list[tuple[Plan, Cost]]:
    """Return the plans of the front to name, spread over the picture, with the first and the last plan."""
    first, last = front[0][1], front[-1][1]
    width, height = first.peak_bytes - last.peak_bytes or 1.0, log(last.step_s / first.step_s) or 1.0
    points = [(cost.peak_bytes / width, log(cost.step_s) / height) for _, cost in front]
    chosen = sorted({0, len(front) - 1})
    while len(chosen) < min(MAX_NAMED, len(front)):
        distances = [min(hypot(x - points[k][0], y - points[k][1]) for k in chosen) for x, y in points]
        if max(distances) < MIN_DISTANCE:
            break
        chosen.append(distances.index(max(distances)))
    return [front[k] for k in sorted(chosen)]


def _wrap_name(name: str) -> str:
    """Return a long name in several lines, divided at its commas."""
    lines = [""]
    for option in name.split(","):
        if lines[-1] and len(lines[-1]) + len(option) > MAX_LINE:
            lines.append("")
        lines[-1] += f"{option},"
    return "\n".join(lines)[:-1]

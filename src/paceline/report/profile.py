"""Predicted and measured time and memory of a run, as text, JSON and a picture."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.events import Profiled
from paceline.plan.cost_model.compare import (
    MEMORY_PARTS,
    TIME_PARTS,
    ComparisonRow,
    compare_parts,
    find_largest_difference,
)
from paceline.plan.cost_model.cost import Cost
from paceline.plotting.figure import COLOURS, figure
from paceline.report.breakdown import SLOW_RATIO, RunBreakdown
from paceline.units import format_bytes, format_seconds, several


@dataclass(frozen=True)
class PredictionReport:
    """A measured breakdown and its prediction.

    cost: the prediction; None for the reason in `unpredicted`. notes: assumptions of the prediction.
    price_per_hour: of a device.
    best: the fastest plan for as many ranks, and its predicted seconds per step; None if nobody asked."""

    measured: RunBreakdown
    cost: Cost | None
    unpredicted: str = ""
    cluster: str = ""
    notes: tuple[str, ...] = ()
    price_per_hour: float | None = None
    best: tuple[str, float] | None = None

    @property
    def time(self) -> list[ComparisonRow]:
        return compare_parts(
            TIME_PARTS, self.measured.seconds, self.cost.time.parts if self.cost is not None else None
        )

    @property
    def memory(self) -> list[ComparisonRow]:
        return compare_parts(
            MEMORY_PARTS, self.measured.memory, self.cost.memory.parts if self.cost is not None else None
        )

    @property
    def step(self) -> ComparisonRow:
        cost = self.cost
        spread = cost.time.error * cost.step_s if cost is not None else 0.0
        return ComparisonRow("step", self.measured.step_s, cost.step_s if cost is not None else None, spread)

    @property
    def peak(self) -> ComparisonRow:
        rows = self.memory
        predicted = sum(row.predicted or 0.0 for row in rows) if self.cost is not None else None
        return ComparisonRow("peak", sum(row.measured for row in rows), predicted)


def format_heading(report: PredictionReport) -> str:
    started = report.measured.started
    task = started.task.rpartition("/")[2]
    where = f" on {report.cluster}" if report.cluster else ""
    ranks = several(started.ranks, "rank")
    heading = f"{task}: plan {started.plan} on {ranks}, {started.device}, batch {started.batch}"
    if report.cost is None:
        return f"{heading}; not predicted: {report.unpredicted}"
    return f"{heading}; predicted{where}"


def build_tables(report: PredictionReport) -> list[Table]:
    memory = f"memory of rank {report.measured.peak_rank}"
    return [
        _build_table("time of a step", report.time, report.step, format_seconds),
        _build_table(memory, report.memory, report.peak, format_bytes),
    ]


def _build_table(
    title: str, rows: list[ComparisonRow], total: ComparisonRow, format_value: Callable[[float], str]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title)
    for name in ("predicted", "±", "measured", "share", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*rows, total]:
        spread = f"{row.spread / row.predicted:.0%}" if row.predicted and row.spread else ""
        error = f"{row.error:+.0%}" if row.error is not None else ""
        predicted = format_value(row.predicted) if row.predicted is not None else ""
        style = "bold" if row is total else None
        table.add_row(
            row.name,
            predicted,
            spread,
            format_value(row.measured),
            f"{row.measured / total.measured:.0%}",
            error,
            style=style,
        )
    return table


def format_profiled(event: Profiled) -> str:
    """Return the time of a step and the memory at its peak as text, without a prediction."""
    memory_bytes = sum(event.memory.values())
    time = f"mean time of {event.num_steps} steps" if event.num_steps > 1 else "time of the step"
    parts = [
        (time, event.seconds, event.step_s, format_seconds),
        (f"memory of rank {event.fullest} at its peak", event.memory, memory_bytes, format_bytes),
    ]
    lines: list[str] = []
    for title, values, total, format_value in parts:
        lines += [f"{title}: {format_value(total)}"]
        lines += [
            f"  {name:<13} {format_value(value):>10} {value / (total or 1):>5.0%}"
            for name, value in values.items()
            if value
        ]
    if event.slowest_s > SLOW_RATIO * event.busy_s:
        lines.append(_describe_straggler(event.slowest, event.slowest_s, event.busy_s))
    return "\n".join(lines)


def build_sentences(report: PredictionReport) -> Iterator[str]:
    """Yield the conclusions from the tables."""
    measured, worst = report.measured, find_largest_difference(report.time)
    if worst is not None and worst.off:
        less = "less" if worst.off < 0 else "more"
        yield (
            f"worst: {worst.name}, predicted {format_seconds(abs(worst.off))} {less} than measured, "
            f"{abs(worst.off) / measured.step_s:.0%} of the step"
        )
    if measured.straggler is not None:
        yield _describe_straggler(measured.straggler, measured.straggler_busy_s, measured.mean_busy_s)
    sampled = f" ({measured.sampled:,} of them were read)" if measured.sampled is not None else ""
    yield (
        f"mean of {measured.steps} steps{sampled}; parts from {several(measured.profiles, 'profile')}, "
        f"which took {measured.profiling_share:.1%} of the run's time"
    )
    yield from report.notes


def _describe_straggler(rank: int, busy_s: float, mean_busy_s: float) -> str:
    return (
        f"rank {rank} is busy for {format_seconds(busy_s)} of a step, the mean rank for "
        f"{format_seconds(mean_busy_s)}: the others wait for it"
    )


def to_json(report: PredictionReport) -> str:
    measured, started = report.measured, report.measured.started
    facts: dict[str, Any] = {
        "task": started.task,
        "plan": started.plan,
        "ranks": started.ranks,
        "device": started.device,
    }
    facts |= {"batch": started.batch, "steps": measured.steps, "profiles": measured.profiles}
    facts |= {"profiling": measured.profiling_share}
    facts |= {
        "cluster": report.cluster or None,
        "not_predicted": report.unpredicted or None,
        "notes": report.notes,
    }
    time = report.cost.time if report.cost is not None else None
    facts |= {
        "flops": time.flops if time is not None else None,
        "peak_flops": time.peak_flops if time is not None else None,
        "price_per_device_hour": report.price_per_hour,
    }
    facts |= {
        "slow_rank": measured.straggler,
        "slow_rank_busy_s": measured.straggler_busy_s,
        "mean_rank_busy_s": measured.mean_busy_s,
        "memory_rank": measured.peak_rank,
    }
    worst = find_largest_difference(report.time)
    facts |= {"worst": worst.name if worst is not None else None}
    facts |= {
        "time_s": _rows_to_json([*report.time, report.step]),
        "memory_bytes": _rows_to_json([*report.memory, report.peak]),
    }
    return json.dumps(facts, indent=1) + "\n"


def _rows_to_json(rows: list[ComparisonRow]) -> dict[str, dict[str, float | None]]:
    return {
        row.name: {
            "predicted": row.predicted,
            "spread": row.spread,
            "measured": row.measured,
            "error": row.error,
        }
        for row in rows
    }


def draw(report: PredictionReport, path: Path) -> None:
    """Draw stacked bars of predicted and measured time and memory."""
    with figure(path, 9.0, 4.2) as canvas:
        for axes, rows, unit, size in zip(
            canvas.subplots(2), (report.time, report.memory), ("ms a step", "MiB"), (1e-3, 2**20), strict=True
        ):
            left = [0.0, 0.0]
            for at, row in enumerate(rows):
                values = [row.measured / size, (row.predicted or 0.0) / size]
                axes.barh([0, 1], values, 0.6, left, color=COLOURS[at % len(COLOURS)], label=row.name)
                left = [begin + value for begin, value in zip(left, values, strict=True)]
            axes.set_yticks([0, 1], ["measured", "predicted"])
            axes.set_xlabel(unit)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        canvas.suptitle(format_heading(report), fontsize=9)

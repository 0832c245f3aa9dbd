"""What was predicted of a run beside what was measured, as text, JSON and a picture."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.plan.cost_model.compare import (
    MEMORY_PARTS,
    TIME_PARTS,
    ComparisonRow,
    compare_parts,
    find_largest_difference,
)
from paceline.plan.cost_model.cost import Cost
from paceline.plotting.figure import COLOURS, figure
from paceline.report.breakdown import RunBreakdown
from paceline.units import format_bytes, format_seconds, several


@dataclass(frozen=True)
class PredictionReport:
    """`cost`: what was predicted, or why nothing was. `notes`: what that rests on."""

    measured: RunBreakdown
    cost: Cost | None
    unpredicted: str = ""
    cluster: str = ""
    notes: tuple[str, ...] = ()

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


def heading(found: PredictionReport) -> str:
    started = found.measured.started
    task = started.task.rpartition("/")[2]
    where = f" on {found.cluster}" if found.cluster else ""
    ranks = several(started.ranks, "rank")
    said = f"{task}: plan {started.plan} on {ranks}, {started.device}, batch {started.batch}"
    return said + (
        f"; predicted{where}" if found.cost is not None else f"; not predicted: {found.unpredicted}"
    )


def tables(found: PredictionReport) -> list[Table]:
    memory = f"memory of rank {found.measured.fullest}"
    return [
        _table("time of a step", found.time, found.step, format_seconds),
        _table(memory, found.memory, found.peak, format_bytes),
    ]


def _table(title: str, rows: list[ComparisonRow], whole: ComparisonRow, say: Callable[[float], str]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(title)
    for name in ("predicted", "±", "measured", "share", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in [*rows, whole]:
        spread = f"{row.spread / row.predicted:.0%}" if row.predicted and row.spread else ""
        error = f"{row.error:+.0%}" if row.error is not None else ""
        predicted = say(row.predicted) if row.predicted is not None else ""
        style = "bold" if row is whole else None
        shown.add_row(
            row.name,
            predicted,
            spread,
            say(row.measured),
            f"{row.measured / whole.measured:.0%}",
            error,
            style=style,
        )
    return shown


def lines(found: PredictionReport) -> Iterator[str]:
    """What the tables come to, in sentences."""
    seen, furthest = found.measured, find_largest_difference(found.time)
    if furthest is not None and furthest.off:
        less = "less" if furthest.off < 0 else "more"
        yield (
            f"worst: {furthest.name}, predicted {format_seconds(abs(furthest.off))} {less} than measured, "
            f"{abs(furthest.off) / seen.step_s:.0%} of the step"
        )
    if seen.slow is not None:
        yield (
            f"rank {seen.slow} is busy for {format_seconds(seen.slow_s)} of a step, the mean rank for {format_seconds(seen.busy_s)}: "
            "the others wait for it"
        )
    times = several(seen.profiles, "profile")
    looked_at = f", of which {seen.sampled:,} were looked at" if seen.sampled is not None else ""
    yield f"mean of {seen.steps} steps{looked_at}; parts from {times}, which took {seen.spent:.1%} of the run's time"
    yield from found.notes


def as_json(found: PredictionReport) -> str:
    seen, started = found.measured, found.measured.started
    facts: dict[str, Any] = {
        "task": started.task,
        "plan": started.plan,
        "ranks": started.ranks,
        "device": started.device,
    }
    facts |= {"batch": started.batch, "steps": seen.steps, "profiles": seen.profiles, "profiling": seen.spent}
    facts |= {
        "cluster": found.cluster or None,
        "not_predicted": found.unpredicted or None,
        "notes": found.notes,
    }
    facts |= {
        "slow_rank": seen.slow,
        "slow_rank_busy_s": seen.slow_s,
        "mean_rank_busy_s": seen.busy_s,
        "memory_rank": seen.fullest,
    }
    furthest = find_largest_difference(found.time)
    facts |= {"worst": furthest.name if furthest is not None else None}
    facts |= {
        "time_s": _figures([*found.time, found.step]),
        "memory_bytes": _figures([*found.memory, found.peak]),
    }
    return json.dumps(facts, indent=1) + "\n"


def _figures(rows: list[ComparisonRow]) -> dict[str, dict[str, float | None]]:
    return {
        row.name: {
            "predicted": row.predicted,
            "spread": row.spread,
            "measured": row.measured,
            "error": row.error,
        }
        for row in rows
    }


def draw(found: PredictionReport, path: Path) -> None:
    """Stacked bars of predicted over measured, of time and of memory."""
    with figure(path, 9.0, 4.2) as drawn:
        for axes, rows, unit, size in zip(
            drawn.subplots(2), (found.time, found.memory), ("ms a step", "MiB"), (1e-3, 2**20), strict=True
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
        drawn.suptitle(heading(found), fontsize=9)

"""Predicted plans as text for a terminal, and as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from paceline.plan.cost_model.cost import Cost
from paceline.plan.plan import Plan
from paceline.plan.report.explain import explained
from paceline.plan.report.scale import as_figures
from paceline.plan.search.best_plans import BestPlans
from paceline.plan.search.ranking import IndistinctPlans
from paceline.plan.search.search import MARGIN
from paceline.units import format_bytes, format_count, format_seconds, several

UNBOUNDED = 10**4  # columns


def heading(found: BestPlans) -> str:
    facts, where = found.facts, found.cluster.name or found.cluster.device.name
    ranks = f"{several(found.ranks, 'rank')} on {where}"
    tokens = f" × {facts.tokens:,} tokens" if facts.tokens > 1 else ""
    return f"{facts.name}: {format_count(facts.params)} parameters, {ranks}, batch {found.batch:,}{tokens}"


def tables(found: BestPlans, top: int, explain: bool) -> list["PlanTable | Table | str"]:
    plans = found.plans[:top]
    shown: list[PlanTable | Table | str] = [_plans(found, plans)]
    if found.tokens is not None:
        shown += ["", _bills(found, plans)]
    return [*shown, *(explained(found) if explain else [])]


class PlanTable:
    """Figures of plans. A plan's name is never broken, so that it can be pasted: where the terminal has no room for it beside the
    figures, it has a line of its own above them. What is still wider is left to the terminal."""

    def __init__(self, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]):
        """rows: the plan, and a figure for each of `names`."""
        self.title, self.names, self.rows = title, names, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=UNBOUNDED)
        beside = self._table(self.title, self.rows)
        if Measurement.get(console, unbounded, beside).maximum <= options.max_width:
            yield beside
            return
        figures = self._table(" ", [["", *row[1:]] for row in self.rows])
        heads = [self.title, *(row[0] for row in self.rows)]
        for head, line in zip(heads, console.render_lines(figures, unbounded, pad=False), strict=True):
            yield from (Segment(head), Segment.line(), *line, Segment.line())

    def _table(self, first: str, rows: Sequence[Sequence[str]]) -> Table:
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        shown.add_column(first, no_wrap=True)
        for name in self.names:
            shown.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            shown.add_row(*row)
        return shown


def _plans(found: BestPlans, plans: Sequence[tuple[Plan, Cost]]) -> PlanTable:
    rate = "tokens/s" if found.facts.tokens > 1 else "samples/s"
    rows = []
    for plan, cost in plans:
        time = cost.time
        cells = [format_seconds(cost.step_s), f"{time.error:.0%}", format_count(time.tokens_per_s)]
        cells += [
            f"{time.mfu:.1%}" if time.mfu is not None else "",
            format_bytes(cost.peak_bytes),
            _fits(cost),
        ]
        rows.append([str(plan), *cells])
    return PlanTable("plan", ["step", "±", rate, "MFU", "memory", "fits"], rows)


def _bills(found: BestPlans, plans: Sequence[tuple[Plan, Cost]]) -> PlanTable:
    """Of the whole training, in a table of its own: a terminal has 80 columns."""
    rows = []
    for plan, cost in plans:
        bill = found.bill(cost)
        assert bill is not None
        cells = [f"{bill.days:,.1f}", f"{bill.device_hours:,.0f}"]
        rows.append(
            [
                str(plan),
                *cells,
                *("" if value is None else f"{value:,.0f}" for value in (bill.kWh, bill.price)),
            ]
        )
    return PlanTable("the whole training under", ["days", "device-hours", "kWh", "price"], rows)


def _fits(cost: Cost) -> str:
    return "yes" if cost.memory.fits(MARGIN) else "barely" if cost.memory.fits() else "no"


def reasons(found: BestPlans) -> list[str]:
    """What does not fit, what is assumed, and what is a guess."""
    lines = []
    if found.rejected:
        parts = Counter(one.largest for one in found.rejected).most_common()
        nearest = found.rejected[0]
        lines.append(
            f"{len(found.pool):,} plans fit; {len(found.rejected):,} do not: most of it is "
            + ", ".join(f"{name} ({count:,})" for name, count in parts)
            + f"; the one that lacks least, {nearest.plan}, {nearest.reason}, a tenth of the device being left free"
        )
    lines += _idle(found)
    lines += found.assumed
    if guesses := found.plans[0][1].time.guesses:
        lines.append("extrapolated: " + "; ".join(guesses))
    return lines


def without_order(found: BestPlans, unranked: IndistinctPlans) -> str:
    """That the best plans cannot be ranked, why, and what to measure."""
    cost = found.plans[0][1]
    if unranked.part is None:
        why = "as much as trainings of one plan differ by; try them out"
    else:
        part = next(part for part in cost.time.parts if part.name == unranked.part)
        why = f"most of it from {part.name}, {part.value / cost.step_s:.0%} of the step and known to ±{part.error:.0%}; narrow it"
    return (
        f"{unranked.count:,} of {len(found.plans):,} plans cannot be ranked: their error bars overlap that of the first, "
        f"±{cost.time.error:.0%}, {why} with: {unranked.measure}"
    )


def _idle(found: BestPlans) -> list[str]:
    """Who says microbatches=1 may mean one sample, as other tools do."""
    plan, cost = found.plans[0]
    waits = sum(part.value for part in cost.time.parts if part.name == "pipeline bubble") / cost.step_s
    if waits < 0.5:
        return []
    on = plan.resolve(found.ranks)
    samples = found.batch // on.dp
    has = f"microbatches={on.microbatches} micro-batch{'es' * (on.microbatches != 1)} of {samples // on.microbatches:,} samples"
    return [
        f"{waits:.0%} of the step the pipeline fills and drains: {plan} has {has}; microbatches={samples} has one sample in each"
    ]


def as_json(found: BestPlans, top: int, unranked: IndistinctPlans | None = None) -> str:
    facts: dict[str, Any] = {
        "model": found.facts.name,
        "parameters": found.facts.params,
        "source": found.facts.source,
    }
    facts |= {
        "cluster": found.cluster.name,
        "ranks": found.ranks,
        "batch": found.batch,
        "tokens_per_sample": found.facts.tokens,
    }
    facts |= {
        "assumed": found.assumed,
        "plans": [_figures(found, plan, cost) for plan, cost in found.plans[:top]],
    }
    rejected = [
        {"plan": str(one.plan), "peak_bytes": one.peak_bytes, "reason": one.reason}
        for one in found.rejected[:top]
    ]
    facts |= {"unranked": asdict(unranked) if unranked is not None else None}
    return (
        json.dumps(
            facts
            | {"fitting": len(found.plans), "rejected": len(found.rejected), "leanest_rejected": rejected},
            indent=1,
        )
        + "\n"
    )


def _figures(found: BestPlans, plan: Plan, cost: Cost) -> dict[str, Any]:
    time, bill = cost.time, found.bill(cost)
    figures = {
        "plan": str(plan),
        "step_s": cost.step_s,
        "step_error": time.error,
        "tokens_per_s": time.tokens_per_s,
        "samples_per_s": time.samples / cost.step_s,
        "model_flops_per_s": time.model_flops_per_s,
        "hardware_flops_per_s": time.hardware_flops_per_s,
        "mfu": time.mfu,
        "peak_bytes": cost.peak_bytes,
        "memory_error": cost.memory.error,
        "fits": cost.memory.fits(MARGIN),
        "extrapolated": time.guesses,
        "time_s": {part.name: part.value for part in time.parts},
        "memory_bytes": {part.name: part.value for part in cost.memory.parts},
    }
    if bill is not None:
        figures["bill"] = as_figures(bill)
    return figures

"""Predicted plans as text for a terminal, and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from paceline.plan.cost_model.cost import Cost
from paceline.plan.cost_model.interruptions import Interruptions
from paceline.plan.plan import Plan
from paceline.plan.report.explain import explain
from paceline.plan.report.scale import bill_as_json
from paceline.plan.search.best_plans import BestPlans
from paceline.plan.search.ranking import IndistinctPlans
from paceline.plan.search.search import MARGIN
from paceline.units import format_bytes, format_count, format_seconds, several

UNBOUNDED = 10**4  # columns


def heading(results: BestPlans) -> str:
    """Return the title of the tables: model, ranks, cluster and batch."""
    facts, where = results.facts, results.cluster.name or results.cluster.device.name
    ranks = f"{several(results.ranks, 'rank')} on {where}"
    tokens = f" × {facts.tokens:,} tokens" if facts.tokens > 1 else ""
    return f"{facts.name}: {format_count(facts.params)} parameters, {ranks}, batch {results.batch:,}{tokens}"


def build_tables(results: BestPlans, top: int, with_explanation: bool) -> list["PlanTable | Table | str"]:
    """Return a table of the first `top` plans, of their cost if a length is given, and the explanation."""
    plans = results.plans[:top]
    parts: list[PlanTable | Table | str] = [_plans(results, plans)]
    if results.tokens is not None:
        parts += ["", _bills(results, plans)]
    return [*parts, *(explain(results) if with_explanation else [])]


class PlanTable:
    """A table of plans. The name of a plan is never wrapped, so that it can be pasted.

    If the terminal is too narrow for a name and its values, the name is on a separate line above the values.
    Lines that are still too wide are left to the terminal.
    """

    def __init__(self, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]):
        """title, names: headers of the plans and of the values. rows: the plan, and a value for each name."""
        self.title, self.names, self.rows = title, names, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=UNBOUNDED)
        table = self._table(self.title, self.rows)
        if Measurement.get(console, unbounded, table).maximum <= options.max_width:
            yield table
            return
        values = self._table(" ", [["", *row[1:]] for row in self.rows])
        heads = [self.title, *(row[0] for row in self.rows)]
        for head, line in zip(heads, console.render_lines(values, unbounded, pad=False), strict=True):
            yield from (Segment(head), Segment.line(), *line, Segment.line())

    def _table(self, first: str, rows: Sequence[Sequence[str]]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(first, no_wrap=True)
        for name in self.names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table


def _plans(results: BestPlans, plans: Sequence[tuple[Plan, Cost]]) -> PlanTable:
    rate = "tokens/s" if results.facts.tokens > 1 else "samples/s"
    has_measured = any(cost.time.is_measured for _, cost in plans)
    rows = []
    for plan, cost in plans:
        time = cost.time
        cells = [format_seconds(cost.step_s), f"{time.error:.0%}", format_count(time.tokens_per_s)]
        cells += [
            f"{time.mfu:.1%}" if time.mfu is not None else "",
            format_bytes(cost.peak_bytes),
            _fits(cost),
        ]
        cells += ["measured" if time.is_measured else "predicted"] if has_measured else []
        rows.append([str(plan), *cells])
    names = ["step", "±", rate, "MFU", "memory", "fits", *(["step is"] if has_measured else [])]
    return PlanTable("plan", names, rows)


def _bills(results: BestPlans, plans: Sequence[tuple[Plan, Cost]]) -> PlanTable:
    """Return the cost of the whole training, in a separate table because a terminal has 80 columns."""
    names = ["days", "device-hours", *_bill_names(results)]
    rows = [[str(plan), *_format_bill(results, cost, names)] for plan, cost in plans]
    return PlanTable("whole training under", names, rows)


def _bill_names(results: BestPlans) -> list[str]:
    return ["kWh", results.currency, *(["kg CO₂"] if results.co2_g_per_kWh is not None else [])]


def _format_bill(results: BestPlans, cost: Cost, names: Sequence[str]) -> list[str]:
    """Return these quantities of the whole training, empty where they are unknown."""
    bill = results.bill(cost)
    assert bill is not None
    values = {"days": bill.days, "device-hours": bill.device_hours, "kWh": bill.kWh, "kg CO₂": bill.co2_kg}
    cells = {name: "" if value is None else _format_large(value) for name, value in values.items()}
    price = "" if bill.price is None else _format_large(bill.price)
    cells |= {bill.currency: price, "price": f"{price} {bill.currency}" if price else ""}
    return [cells[name] for name in names]


def _format_large(value: float) -> str:
    """Return an amount that may be large, whole from 100 on, else with three digits."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else "<0.001" if value < 1e-3 else f"{value:.3g}"


def _fits(cost: Cost) -> str:
    return "yes" if cost.memory.fits(MARGIN) else "barely" if cost.memory.fits() else "no"


def list_notes(results: BestPlans) -> list[str]:
    """Return sentences about the plans that do not fit, assumptions and extrapolations."""
    lines = []
    if results.rejected:
        parts = Counter(entry.largest for entry in results.rejected).most_common()
        nearest = results.rejected[0]
        lines.append(
            f"{several(len(results.pool), 'plan')} fit; {len(results.rejected):,} do not, mostly because of "
            + ", ".join(f"{name} ({count:,})" for name, count in parts)
            + f"; the closest, {nearest.plan}, {nearest.reason}; a tenth of the device memory stays free"
        )
    lines += _warn_of_bubble(results)
    if results.interruptions is not None:
        lines.append(_describe_interruptions(results.interruptions))
    if (stored := count_data_bytes(results)) is not None:
        lines.append(
            f"data: {format_count(results.tokens or 0)} tokens are {format_bytes(stored)} as numbers of "
            f"{token_bytes(results.facts.vocab)} bytes"
        )
    lines += results.assumed
    if guesses := results.plans[0][1].time.guesses:
        lines.append("extrapolated: " + "; ".join(guesses))
    return lines


def token_bytes(vocab: int) -> int:
    """Return the bytes of the number of a token, as files of tokens store it."""
    return 2 if vocab <= 2**16 else 4


def count_data_bytes(results: BestPlans) -> float | None:
    """Return the bytes of the tokens of the whole training, or None if it has no tokens or no length."""
    if results.tokens is None or not results.facts.vocab:
        return None
    return results.tokens * token_bytes(results.facts.vocab)


def _describe_interruptions(found: Interruptions) -> str:
    return (
        f"interruptions every {format_seconds(found.mean_s)} on average: with a checkpoint every "
        f"{format_seconds(found.interval_s)}, which is best if a save takes {format_seconds(found.save_s)} "
        f"and a restart {format_seconds(found.restart_s)}, the training takes {found.slowdown:.3g} times as "
        f"long (Daly 2006)"
    )


def compare_clusters(results: Sequence[BestPlans]) -> PlanTable:
    """Return a table of the best plan on each cluster; with a length, of the whole training there."""
    rate = "tokens/s" if results[0].facts.tokens > 1 else "samples/s"
    names = ["step", "±", rate, "memory"]
    billed = ["days", *_bill_names(results[0])] if results[0].tokens is not None else []
    if len({result.currency for result in results}) > 1:
        billed = ["price" if name == results[0].currency else name for name in billed]
    rows = []
    for result in results:
        plan, cost = result.plans[0]
        cells = [format_seconds(cost.step_s), f"{cost.time.error:.0%}"]
        cells += [format_count(cost.time.tokens_per_s), format_bytes(cost.peak_bytes)]
        cells += _format_bill(result, cost, billed) if billed else []
        where = f"{several(result.ranks, 'rank')} on {result.cluster.name or result.cluster.device.name}"
        rows.append([f"{where}: {plan}", *cells])
    return PlanTable("best plan on each machine", [*names, *billed], rows)


def list_cluster_notes(results: Sequence[BestPlans]) -> list[str]:
    """Return sentences about assumptions, extrapolations and interruptions, with the clusters' names."""
    lines = []
    for result in results:
        notes = [*result.assumed, *result.plans[0][1].time.guesses]
        if result.interruptions is not None:
            notes.append(_describe_interruptions(result.interruptions))
        name = result.cluster.name or result.cluster.device.name
        lines += [f"{name}: {note}" for note in notes]
    return lines


def describe_measured(results: BestPlans, maybe_faster: int) -> str:
    """Return a sentence about the plans without a measurement, below a table whose first plan has one."""
    measured = sum(cost.time.is_measured for _, cost in results.plans)
    others = len(results.plans) - measured
    ranked = f"measured: {several(measured, 'plan')}, ranked first; predicted: {others:,}"
    if not maybe_faster:
        return f"{ranked}, none of which is faster within its error bar"
    return (
        f"{ranked}, of which {maybe_faster:,} may be faster within their error bars; a larger --measure also "
        "trains the next ones"
    )


def describe_overlap(results: BestPlans, unranked: IndistinctPlans) -> str:
    """Return a sentence about plans whose error bars overlap: why, and what to measure to rank them."""
    cost = results.plans[0][1]
    if unranked.part is None:
        why = "the usual difference between trainings of one plan; try them"
    else:
        part = next(part for part in cost.time.parts if part.name == unranked.part)
        why = (
            f"mostly from {part.name}, which is {part.value / cost.step_s:.0%} of the step and known"
            f" to ±{part.error:.0%}; reduce it"
        )
    return (
        f"{unranked.count:,} of {len(results.plans):,} plans cannot be ranked: their error bars overlap"
        f" that of the first, ±{cost.time.error_of_plan:.0%}, {why} with: {unranked.measure}"
    )


def _warn_of_bubble(results: BestPlans) -> list[str]:
    """Return a warning if the bubble is more than half of the step.

    A user of `microbatches=1` may mean one sample, as in other tools.
    """
    plan, cost = results.plans[0]
    bubble = sum(part.value for part in cost.time.parts if part.name == "pipeline bubble") / cost.step_s
    if bubble < 0.5:
        return []
    resolved = plan.resolve(results.ranks)
    count, samples = resolved.microbatches, results.batch // resolved.dp
    return [
        f"the pipeline bubble is {bubble:.0%} of the step: {plan} has"
        f" {count:,} {'micro-batch' if count == 1 else 'micro-batches'}"
        f" of {samples // count:,} samples; with microbatches={samples}, each has one sample"
    ]


def as_tree(results: BestPlans, top: int, unranked: IndistinctPlans | None = None) -> dict[str, Any]:
    """Return the plans for JSON; docs/json.md lists the keys."""
    facts: dict[str, Any] = {
        "model": results.facts.name,
        "parameters": results.facts.params,
        "source": results.facts.source,
    }
    facts |= {
        "cluster": results.cluster.name,
        "ranks": results.ranks,
        "batch": results.batch,
        "tokens_per_sample": results.facts.tokens,
    }
    if (stored := count_data_bytes(results)) is not None:
        facts["data_bytes"] = stored
    facts |= {
        "assumed": results.assumed,
        "plans": [_figures(results, plan, cost) for plan, cost in results.plans[:top]],
    }
    rejected = [
        {"plan": str(entry.plan), "peak_bytes": entry.peak_bytes, "reason": entry.reason}
        for entry in results.rejected[:top]
    ]
    facts |= {"unranked": asdict(unranked) if unranked is not None else None}
    if results.interruptions is not None:
        found = results.interruptions
        facts |= {
            "interruptions": found._asdict() | {"interval_s": found.interval_s, "slowdown": found.slowdown}
        }
    return facts | {
        "fitting": len(results.plans),
        "rejected": len(results.rejected),
        "leanest_rejected": rejected,
    }


def _figures(results: BestPlans, plan: Plan, cost: Cost) -> dict[str, Any]:
    time, bill = cost.time, results.bill(cost)
    figures = {
        "plan": str(plan),
        "step_s": cost.step_s,
        "step_error": time.error,
        "is_measured": time.is_measured,
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
        figures["bill"] = bill_as_json(bill)
    return figures

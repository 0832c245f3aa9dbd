"""Explain a plan: its time and memory by part, the cost of other choices, and why other plans do not fit."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from paceline.plan.cost_model.block_communication import rank_group
from paceline.plan.cost_model.cost import Cost, CostPart, list_slower_parts
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans
from paceline.units import format_bytes, format_seconds

CHOICES: Mapping[str, Callable[[Plan], str]] = {
    "tp": lambda plan: f"tp={plan.tp}",
    "pp": lambda plan: f"pp={plan.pp}",
    "cp": lambda plan: f"cp={plan.cp}",
    "ep": lambda plan: f"ep={plan.ep}",
    "zero": lambda plan: f"zero={plan.zero}" + (f",replicate={plan.replicate}" if plan.replicate > 1 else ""),
    "schedule": lambda plan: (
        f"{plan.pp_schedule},stages={plan.stages}" if plan.pp_schedule else "no pipeline"
    ),
    "recompute": lambda plan: f"recompute={plan.recompute}",
}
MAX_ALTERNATIVES = 3  # of each choice, the best


def explain(results: BestPlans) -> list[Table | str]:
    """Return text about the first plan: summary, alternatives, parts, and a comparison with the next plan."""
    plan, cost = results.plans[0]
    parts: list[Table | str] = [
        *_summary(results, plan, cost),
        *_alternatives(results, plan.resolve(results.ranks), cost),
    ]
    parts += [
        f"\ntime of {plan}",
        _parts(cost.time.parts, cost.step_s, format_seconds, _describe_groups(results, plan)),
    ]
    at = f", rank {cost.memory.rank} of the pipeline" if plan.pp > 1 else ""
    parts += [
        f"\nmemory of the rank with peak memory{at}",
        _parts(cost.memory.parts, cost.peak_bytes, format_bytes, {}),
    ]
    if len(results.plans) > 1:
        next_plan, next_cost = results.plans[1]
        slower = [part for part in list_slower_parts(next_cost, cost) if abs(part.value) > 1e-3 * cost.step_s]
        more_bytes = next_cost.peak_bytes - cost.peak_bytes
        parts += [
            f"\ndifference of the next plan, {next_plan}: {_signed(next_cost.step_s - cost.step_s)},"
            f" {_signed(more_bytes, format_bytes)}"
        ]
        parts += [_parts(slower, cost.step_s, _signed, {})] if slower else []
    return parts


def _summary(results: BestPlans, plan: Plan, cost: Cost) -> list[str]:
    """Return one or two sentences: the rank of the plan among all plans that fit, and its largest part."""
    pool = results.pool
    largest = max(cost.time.parts, key=lambda part: part.value)
    of_step = f"{largest.value / cost.step_s:.0%} of its step is {largest.name}"
    memory = f"{format_bytes(cost.peak_bytes)} of {format_bytes(cost.memory.limit_bytes)}"
    peak = f", and it uses {memory}" if cost.memory.fits() else f"; it does not fit: it needs {memory}"
    if len(pool) == 0:
        return [f"\n{plan}: {of_step}{peak}"]
    best, fastest = pool[0]
    if best == plan.resolve(results.ranks):
        why = f"the fastest of {len(pool):,} plans that fit"
        if cost.time.is_measured:
            why = f"the fastest measured one of {len(pool):,} plans that fit"
        return [f"\nwhy {plan}: {why}; {of_step}{peak}"]
    num_faster = sum(other.step_s < cost.step_s for _, other in pool)
    lines = [f"\n{plan}: {num_faster:,} of {len(pool):,} plans that fit are faster; {of_step}{peak}"]
    parts = _select_parts(list_slower_parts(cost, fastest), cost.step_s)
    differences = ", ".join(f"{part.name} {_signed(part.value)}" for part in parts)
    return [
        *lines,
        f"the fastest, {best}, takes {format_seconds(fastest.step_s)};"
        f" difference of this plan: {differences or 'none'}",
    ]


def _alternatives(results: BestPlans, plan: Plan, cost: Cost) -> list[Table | str]:
    """Return a table with the cost of other values for each choice in the plan.

    For the best plan, a row is the fastest plan with that value. For a requested plan that is not the best,
    it is the plan that differs only in this choice, and possibly in its micro-batches.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("instead", no_wrap=True)
    for name in ("step", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest differences")
    is_best = bool(results.pool) and results.pool[0][0] == plan
    fitting = [(_changed(plan, other), other, other_cost) for other, other_cost in results.pool]
    rejected = [(_changed(plan, entry.plan), entry) for entry in results.rejected]
    for name, choice in CHOICES.items():
        best: dict[str, Cost] = {}
        for changed, other, other_cost in fitting:
            if changed == {name} or (is_best and name in changed):
                best.setdefault(choice(other), other_cost)
        for value, other_cost in list(best.items())[:MAX_ALTERNATIVES]:
            parts = ", ".join(
                f"{part.name} {_signed(part.value)}"
                for part in _select_parts(list_slower_parts(other_cost, cost), cost.step_s)
            )
            table.add_row(
                value, _signed(other_cost.step_s - cost.step_s), format_bytes(other_cost.peak_bytes), parts
            )
        candidates = (
            entry for changed, entry in rejected if changed == {name} or (is_best and name in changed)
        )
        nearest = next((entry for entry in candidates if choice(entry.plan) not in best), None)
        if nearest is not None:
            table.add_row(
                choice(nearest.plan),
                "",
                format_bytes(nearest.peak_bytes),
                f"does not fit, mostly because of {nearest.largest}",
            )
    title = (
        "the fastest plan with another choice; its other choices may differ, too"
        if is_best
        else "with one choice changed, and its micro-batches if necessary"
    )
    return [f"\n{title}", table] if table.row_count else []


def _changed(plan: Plan, other: Plan) -> set[str]:
    return {name for name, choice in CHOICES.items() if choice(other) != choice(plan)}


def _select_parts(parts: Sequence[CostPart], step_s: float) -> list[CostPart]:
    """Return the two largest increases and the largest decrease, if they are above 1 % of the step."""
    increases = [part for part in parts if part.value > 0.01 * step_s][:2]
    decreases = [part for part in parts[-1:] if part.value < -0.01 * step_s]
    return [*increases, *decreases]


def _describe_groups(results: BestPlans, plan: Plan) -> dict[str, str]:
    """Return the ranks that communicate for each part of the time, and how they are placed on nodes."""
    resolved = plan.resolve(results.ranks)
    per_node = min(results.ranks, results.cluster.ranks_per_node)

    def ranks(count: int, stride: int) -> str:
        same_node = rank_group(count, stride, per_node).together
        return f"{count:,} ranks" + (
            " of a node"
            if same_node >= count
            else f", {same_node} in each node"
            if same_node > 1
            else ", each in another node"
        )

    data = ranks(resolved.data_ranks, resolved.tp)
    return {
        "tensor parallel": ranks(resolved.tp, 1),
        "context parallel": ranks(resolved.cp, resolved.tp),
        "expert parallel": ranks(resolved.ep, resolved.tp * resolved.cp),
        "data parallel": data,
        "gathered weights": data,
        "pipeline bubble": (
            f"{resolved.pp} ranks, {resolved.microbatches} micro-batches, {resolved.pp_schedule}"
        ),
        "computed again": f"recompute={resolved.recompute}",
    }


def _parts(
    parts: Sequence[CostPart],
    whole: float,
    format_value: Callable[[float], str],
    groups: Mapping[str, str],
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for name in ("", "share", "±"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for part in parts:
        if part.value:
            note = "; ".join(text for text in (groups.get(part.name, ""), part.note) if text)
            table.add_row(
                part.name, format_value(part.value), f"{part.value / whole:.1%}", f"{part.error:.0%}", note
            )
    return table


def _signed(value: float, format_value: Callable[[float], str] = format_seconds) -> str:
    return ("-" if value < 0 else "+") + format_value(abs(value))

"""Why a plan: what its time and memory go into, what each choice in it would cost otherwise, and why others do not fit."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from paceline.plan.cost_model.cost import Cost, CostPart, list_slower_parts
from paceline.plan.cost_model.step_time import rank_group
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans
from paceline.units import format_bytes, format_seconds

CHOICES: Mapping[str, Callable[[Plan], str]] = {
    "tp": lambda plan: f"tp={plan.tp}",
    "pp": lambda plan: f"pp={plan.pp}",
    "cp": lambda plan: f"cp={plan.cp}",
    "zero": lambda plan: f"zero={plan.zero}" + (f",replicate={plan.replicate}" if plan.replicate > 1 else ""),
    "schedule": lambda plan: (
        f"{plan.pp_schedule},stages={plan.stages}" if plan.pp_schedule else "no pipeline"
    ),
    "recompute": lambda plan: f"recompute={plan.recompute}",
}
ALTERNATIVES = 3  # of each choice, the best


def explained(found: BestPlans) -> list[Table | str]:
    """Of the first plan: parts, choices, and the next best."""
    plan, cost = found.plans[0]
    shown: list[Table | str] = [*_why(found, plan, cost), *_choices(found, plan.resolve(found.ranks), cost)]
    shown += [f"\ntime of {plan}", _parts(cost.time.parts, cost.step_s, format_seconds, _among(found, plan))]
    at = f", rank {cost.memory.rank} of the pipeline" if plan.pp > 1 else ""
    shown += [
        f"\nmemory of its fullest rank{at}",
        _parts(cost.memory.parts, cost.peak_bytes, format_bytes, {}),
    ]
    if len(found.plans) > 1:
        other, slower = found.plans[1]
        more = [part for part in list_slower_parts(slower, cost) if abs(part.value) > 1e-3 * cost.step_s]
        bytes_ = slower.peak_bytes - cost.peak_bytes
        shown += [
            f"\nwhat the next, {other}, takes more: {_signed(slower.step_s - cost.step_s)}, {_signed(bytes_, format_bytes)}"
        ]
        shown += [_parts(more, cost.step_s, _signed, {})] if more else []
    return shown


def _why(found: BestPlans, plan: Plan, cost: Cost) -> list[str]:
    """The plan in a sentence: where it stands, and what it does most."""
    pool = found.pool
    most = max(cost.time.parts, key=lambda part: part.value)
    of_step = f"{most.value / cost.step_s:.0%} of its step is {most.name}"
    of = f"{format_bytes(cost.peak_bytes)} of {format_bytes(cost.memory.limit_bytes)}"
    peak = f", and {of} are taken" if cost.memory.fits() else f"; it does not fit: {of} are needed"
    if len(pool) == 0:
        return [f"\n{plan}: {of_step}{peak}"]
    best, fastest = pool[0]
    if best == plan.resolve(found.ranks):
        return [f"\nwhy {plan}: the fastest of {len(pool):,} that fit; {of_step}{peak}"]
    behind = sum(other.step_s < cost.step_s for _, other in pool)
    lines = [f"\n{plan}: {behind:,} of {len(pool):,} plans that fit are faster; {of_step}{peak}"]
    more = ", ".join(
        f"{part.name} {_signed(part.value)}"
        for part in _telling(list_slower_parts(cost, fastest), cost.step_s)
    )
    return [
        *lines,
        f"the fastest, {best}, takes {format_seconds(fastest.step_s)}: this one takes {more or 'as long'}",
    ]


def _choices(found: BestPlans, plan: Plan, cost: Cost) -> list[Table | str]:
    """For each choice in the plan what another one takes: the fastest that has it; but of a plan that was asked for and is not the best,
    the one that differs in this alone, and perhaps in its micro-batches."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("instead", no_wrap=True)
    for name in ("step", "memory"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("of that")
    is_best = bool(found.pool) and found.pool[0][0] == plan
    fitting = [(_changed(plan, other), other, its) for other, its in found.pool]
    unfit = [(_changed(plan, one.plan), one) for one in found.rejected]
    for name, choice in CHOICES.items():
        best: dict[str, Cost] = {}
        for changed, other, its in fitting:
            if changed == {name} or (is_best and name in changed):
                best.setdefault(choice(other), its)
        for value, its in list(best.items())[:ALTERNATIVES]:
            parts = ", ".join(
                f"{part.name} {_signed(part.value)}"
                for part in _telling(list_slower_parts(its, cost), cost.step_s)
            )
            shown.add_row(value, _signed(its.step_s - cost.step_s), format_bytes(its.peak_bytes), parts)
        lean = (one for changed, one in unfit if changed == {name} or (is_best and name in changed))
        if (nearest := next((one for one in lean if choice(one.plan) not in best), None)) is not None:
            row = (
                choice(nearest.plan),
                "",
                format_bytes(nearest.peak_bytes),
                f"does not fit, most of it {nearest.largest}",
            )
            shown.add_row(*row)
    what = (
        "the fastest with another choice, all else free"
        if is_best
        else "with one choice changed, and perhaps the micro-batches"
    )
    return [f"\n{what}", shown] if shown.row_count else []


def _changed(plan: Plan, other: Plan) -> set[str]:
    return {name for name, choice in CHOICES.items() if choice(other) != choice(plan)}


def _telling(parts: Sequence[CostPart], step_s: float) -> list[CostPart]:
    """The two that are most more, and the one that is most less."""
    more = [part for part in parts if part.value > 0.01 * step_s][:2]
    less = [part for part in parts[-1:] if part.value < -0.01 * step_s]
    return [*more, *less]


def _among(found: BestPlans, plan: Plan) -> dict[str, str]:
    """Who talks to whom, of which how many are in one node."""
    on = plan.resolve(found.ranks)
    per_node = min(found.ranks, found.cluster.ranks_per_node)

    def ranks(count: int, stride: int) -> str:
        inside = rank_group(count, stride, per_node).together
        return f"{count:,} ranks" + (
            " of a node"
            if inside >= count
            else f", {inside} in each node"
            if inside > 1
            else ", each in its own node"
        )

    data = ranks(on.data_ranks, on.tp)
    return {
        "tensor parallel": ranks(on.tp, 1),
        "context parallel": ranks(on.cp, on.tp),
        "data parallel": data,
        "gathered weights": data,
        "pipeline bubble": f"{on.pp} ranks, {on.microbatches} micro-batches, {on.pp_schedule}",
        "computed again": f"recompute={on.recompute}",
    }


def _parts(
    parts: Sequence[CostPart], whole: float, say: Callable[[float], str], among: Mapping[str, str]
) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("part", no_wrap=True)
    for name in ("", "share", "±"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for part in parts:
        if part.value:
            note = "; ".join(text for text in (among.get(part.name, ""), part.note) if text)
            shown.add_row(part.name, say(part.value), f"{part.value / whole:.1%}", f"{part.error:.0%}", note)
    return shown


def _signed(value: float, say: Callable[[float], str] = format_seconds) -> str:
    return ("-" if value < 0 else "+") + say(abs(value))

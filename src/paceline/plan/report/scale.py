"""How a training scales, as text and JSON."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from paceline.plan.cost_model.cost import Bill
from paceline.plan.search.scaling import Curve, InfeasibleCount, Scaling, ScalingPoint, find_last_efficient
from paceline.units import format_count, format_seconds, several

WORTH_NAMING = 0.01  # of the devices' time
HOUR_S, DAY_S, YEAR_S = 3600.0, 86400.0, 365 * 86400.0


def heading(found: Scaling) -> str:
    facts, where, each = found.facts, found.cluster, found.cluster.ranks_per_node
    return f"{facts.name}: {format_count(facts.params)} parameters, nodes of {each} × {where.device.name}" + (
        f", samples of {facts.tokens:,} tokens" if facts.tokens > 1 else ""
    )


def tables(found: Scaling) -> list[Table | str]:
    """Figures, and below them the plans, whose names are long."""
    each = found.each
    per_rank = f"{each.numerator:,}" if each.denominator == 1 else f"{each.numerator:,}/{each.denominator:,}"
    shown: list[Table | str] = [
        f"\nstrong scaling: a batch of {found.batch:,}, whatever the ranks",
        _figures(found, found.strong),
    ]
    shown += _refused(found.strong.refused)
    shown += [f"\nweak scaling: {per_rank} samples of a batch for each rank", _figures(found, found.weak)]
    shown += [] if _alike(found) else _refused(found.weak.refused)
    return [*shown, "\nthe fastest plans that fit", *_plans(found)]


def _alike(found: Scaling) -> bool:
    """Whether the same numbers of ranks are refused for the same want."""
    strong, weak = ([(one.ranks, one.want) for one in curve.refused] for curve in (found.strong, found.weak))
    return strong == weak


def _figures(found: Scaling, curve: Curve) -> Table:
    """Not wider than 80 columns."""
    rate = "tokens/s" if found.facts.tokens > 1 else "samples/s"
    names = ["ranks", "step", "±", rate, "efficiency"]
    if found.tokens is not None:
        names += ["time", "device\nhours"]
        names += [
            name
            for name in ("kWh", "price")
            if any(getattr(point.bill, name) is not None for point in curve.points)
        ]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for point in curve.points:
        cost, bill = point.cost, point.bill
        cells = [f"{point.ranks:,}", format_seconds(cost.step_s), f"{cost.time.error:.0%}"]
        cells += [format_count(cost.time.tokens_per_s), f"{point.efficiency:.0%}"]
        if bill is not None:
            told = {"kWh": bill.kWh, "price": bill.price}
            cells += [duration(bill.seconds), amount(bill.device_hours)]
            cells += [amount(told[name] or 0.0) for name in names if name in told]
        shown.add_row(*cells)
    return shown


def _plans(found: Scaling) -> list[str]:
    """Names are long: lines that a terminal may wrap, and that can be copied."""
    points = {
        (point.ranks, point.batch): point for curve in (found.strong, found.weak) for point in curve.points
    }
    wide, wider = (max(len(f"{key[at]:,}") for key in points) for at in (0, 1))
    return [
        f"{'ranks':>{max(wide, 5)}}  {'batch':>{max(wider, 5)}}  plan",
        *(
            f"{point.ranks:>{max(wide, 5)},}  {point.batch:>{max(wider, 5)},}  {point.plan}"
            for _, point in sorted(points.items())
        ),
    ]


def _refused(refused: Sequence[InfeasibleCount]) -> list[Table | str]:
    """Numbers of ranks that lack the same, in one sentence: of the last that lacks memory, of the first that lacks samples."""
    lines: list[Table | str] = []
    for want, group in groupby(refused, key=lambda one: one.want):
        alike = list(group)
        counts = ", ".join(f"{one.ranks:,}" for one in alike)
        told = alike[-1] if want == "memory" else alike[0]
        of = f"on {told.ranks:,}, " if len(alike) > 1 and want != "nodes" else ""
        lines.append(f"{counts} ranks {'do not fit' if want == 'memory' else 'cannot be'}: {of}{told.reason}")
    return lines


def sentences(found: Scaling, efficiency: float) -> list[str]:
    """How many to ask for; what limits that; what is assumed and what is a guess."""
    lines = ["", recommendation(found, efficiency)]
    points, batch = found.strong.points, found.batch
    last = points[-1]
    if last.lost and last.lost.value > WORTH_NAMING > last.efficiency - 1:
        lines.append(
            f"on {last.ranks:,}, most is lost to {last.lost.name}: {last.lost.value:.0%} of the time of all devices"
        )
    if max(point.efficiency for point in points) > 1 + WORTH_NAMING:
        lines.append("above 100%: more ranks have the memory for plans that compute less twice, or wait less")
    if last.ranks > batch:
        many = next(point.ranks for point in points if point.ranks > batch)
        lines.append(
            f"a batch of {batch:,} has no sample for each rank from {many:,} on: there, ranks share samples by tp, pp or cp"
        )
    largest = found.weak.points[-1] if found.weak.points else None
    if largest and largest.batch > batch:
        tokens = (
            f" ({format_count(largest.batch * found.facts.tokens)} tokens)" if found.facts.tokens > 1 else ""
        )
        size = f"{largest.batch:,}{tokens}"
        lines.append(
            f"weak scaling ends at a batch of {size}: whether so large a one learns as much from each sample is not predicted"
        )
    lines += found.assumed
    if guesses := dict.fromkeys(
        guess
        for curve in (found.strong, found.weak)
        for point in curve.points
        for guess in point.cost.time.guesses
    ):
        lines.append("extrapolated: " + "; ".join(guesses))
    return lines


def recommendation(found: Scaling, efficiency: float) -> str:
    points = found.strong.points
    best = find_last_efficient(found.strong, efficiency)
    at = several(best.ranks, "rank")
    if len(points) == 1:
        return f"{at} alone can be: {_takes(best)}"
    if best is points[0]:
        why = f"of more, each does less than {efficiency:.0%} of that"
    else:
        why = f"the most of which each does {efficiency:.0%} or more of what each of {points[0].ranks:,} does ({best.efficiency:.0%})"
    more = next((point for point in points if point.ranks > best.ranks), None)
    line = f"ask for {at}: {why}; {_takes(best)}"
    if more is None:
        return line
    seconds = more.cost.step_s / best.cost.step_s
    return f"{line}. {more.ranks:,} would take {seconds:.0%} of the time and {best.efficiency / more.efficiency - 1:.0%} more device-hours"


def _takes(point: ScalingPoint) -> str:
    bill = point.bill
    if bill is None:
        return f"a step takes {format_seconds(point.cost.step_s)}"
    paid = f", at a price of {amount(bill.price)}" if bill.price is not None else ""
    return f"the training takes {duration(bill.seconds)} and {amount(bill.device_hours)} device-hours{paid}"


def amount(value: float) -> str:
    """Of hours, energy and money, where a thousandth is nothing."""
    return "<0.001" if 0 < value < 1e-3 else f"{value:.3f}" if value < 1 else format_count(value)


def duration(seconds: float) -> str:
    """As people speak of whole trainings."""
    if seconds >= 2 * YEAR_S:
        return f"{seconds / YEAR_S:,.1f} years"
    return (
        f"{seconds / DAY_S:,.1f} days"
        if seconds >= 2 * DAY_S
        else f"{seconds / 3600:,.1f} h"
        if seconds >= 7200
        else format_seconds(seconds)
    )


def as_json(found: Scaling, efficiency: float) -> str:
    whole: dict[str, Any] = {
        "model": found.facts.name,
        "parameters": found.facts.params,
        "source": found.facts.source,
    }
    whole |= {
        "cluster": found.cluster.name,
        "device": found.cluster.device.name,
        "ranks_of_a_node": found.cluster.ranks_per_node,
    }
    whole |= {"tokens_per_sample": found.facts.tokens, "tokens": found.tokens, "assumed": found.assumed}
    whole |= {"efficiency": efficiency, "ask_for": find_last_efficient(found.strong, efficiency).ranks}
    for name, curve in (("strong", found.strong), ("weak", found.weak)):
        points = [_point(point) for point in curve.points]
        whole[name] = {
            "points": points,
            "refused": [
                {"ranks": one.ranks, "want": one.want, "reason": one.reason} for one in curve.refused
            ],
        }
    return json.dumps(whole, indent=1) + "\n"


def _point(point: ScalingPoint) -> dict[str, Any]:
    time = point.cost.time
    figures: dict[str, Any] = {
        "ranks": point.ranks,
        "nodes": point.nodes,
        "batch": point.batch,
        "plan": str(point.plan),
    }
    figures |= {
        "step_s": time.step_s,
        "step_error": time.error,
        "tokens_per_s": time.tokens_per_s,
        "efficiency": point.efficiency,
    }
    figures |= {"mfu": time.mfu, "peak_bytes": point.cost.peak_bytes, "extrapolated": time.guesses}
    figures |= {"time_s": {part.name: part.value for part in time.parts}}
    figures |= {"lost": {"part": point.lost.name, "share": point.lost.value} if point.lost else None}
    return figures | ({"bill": as_figures(point.bill)} if point.bill else {})


def as_figures(bill: Bill) -> dict[str, float | None]:
    return {"seconds": bill.seconds, "device_hours": bill.device_hours, "kWh": bill.kWh, "price": bill.price}

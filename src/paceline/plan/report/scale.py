"""How a training scales, as text and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table

from paceline.plan.cost_model.cost import Bill
from paceline.plan.search.scaling import Curve, InfeasibleCount, Scaling, ScalingPoint, find_last_efficient
from paceline.units import format_count, format_seconds, several

MIN_SHARE = 0.01  # of the devices' time; smaller shares are not reported
HOUR_S, DAY_S, YEAR_S = 3600.0, 86400.0, 365 * 86400.0


def heading(scaling: Scaling) -> str:
    """Return the title of the tables: model and nodes."""
    facts, cluster = scaling.facts, scaling.cluster
    tokens = f", samples of {facts.tokens:,} tokens" if facts.tokens > 1 else ""
    return (
        f"{facts.name}: {format_count(facts.params)} parameters,"
        f" nodes of {cluster.ranks_per_node} × {cluster.device.name}{tokens}"
    )


def build_tables(scaling: Scaling) -> list[Table | str]:
    """Return the tables of strong and weak scaling, and below them the plans, whose names are long."""
    samples = scaling.each
    per_rank = f"{samples.numerator:,}"
    if samples.denominator != 1:
        per_rank += f"/{samples.denominator:,}"
    parts: list[Table | str] = [
        f"\nstrong scaling: a batch of {scaling.batch:,} on any number of ranks",
        _curve_table(scaling, scaling.strong),
    ]
    parts += _describe_refused(scaling.strong.refused)
    parts += [
        f"\nweak scaling: {per_rank} samples of the batch per rank",
        _curve_table(scaling, scaling.weak),
    ]
    parts += [] if _has_same_refusals(scaling) else _describe_refused(scaling.weak.refused)
    return [*parts, "\nfastest plans that fit", *_plans(scaling)]


def _has_same_refusals(scaling: Scaling) -> bool:
    """Return whether strong and weak scaling refuse the same numbers of ranks for the same reason."""
    strong, weak = (
        [(count.ranks, count.want) for count in curve.refused] for curve in (scaling.strong, scaling.weak)
    )
    return strong == weak


def _curve_table(scaling: Scaling, curve: Curve) -> Table:
    """Return the table of a curve, at most 80 columns wide."""
    rate = "tokens/s" if scaling.facts.tokens > 1 else "samples/s"
    names = ["ranks", "step", "±", rate, "efficiency"]
    if scaling.tokens is not None:
        names += ["time", "device\nhours"]
        bills = [point.bill for point in curve.points if point.bill is not None]
        names += ["kWh"] if any(bill.kWh is not None for bill in bills) else []
        names += [bills[0].currency] if any(bill.price is not None for bill in bills) else []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for point in curve.points:
        cost, bill = point.cost, point.bill
        cells = [f"{point.ranks:,}", format_seconds(cost.step_s), f"{cost.time.error:.0%}"]
        cells += [format_count(cost.time.tokens_per_s), f"{point.efficiency:.0%}"]
        if bill is not None:
            optional = {"kWh": bill.kWh, bill.currency: bill.price}
            cells += [format_duration(bill.seconds), format_amount(bill.device_hours)]
            cells += [format_amount(optional[name] or 0.0) for name in names if name in optional]
        table.add_row(*cells)
    return table


def _plans(scaling: Scaling) -> list[str]:
    """Return the plans as lines instead of a table: a terminal may wrap them, and they can be copied."""
    points = {
        (point.ranks, point.batch): point
        for curve in (scaling.strong, scaling.weak)
        for point in curve.points
    }
    ranks_width, batch_width = (max(5, *(len(f"{key[at]:,}") for key in points)) for at in (0, 1))
    return [
        f"{'ranks':>{ranks_width}}  {'batch':>{batch_width}}  plan",
        *(
            f"{point.ranks:>{ranks_width},}  {point.batch:>{batch_width},}  {point.plan}"
            for _, point in sorted(points.items())
        ),
    ]


def _describe_refused(refused: Sequence[InfeasibleCount]) -> list[Table | str]:
    """Return a sentence for each group of consecutive numbers of ranks that are refused for the same reason.

    The reason is that of the largest number that lacks memory, or of the smallest number that lacks samples.
    """
    lines: list[Table | str] = []
    for want, counts in groupby(refused, key=lambda count: count.want):
        group = list(counts)
        ranks = ", ".join(f"{count.ranks:,}" for count in group)
        example = group[-1] if want == "memory" else group[0]
        on = f"on {example.ranks:,}, " if len(group) > 1 and want != "nodes" else ""
        verdict = "do not fit" if want == "memory" else "are not possible"
        lines.append(f"{ranks} ranks {verdict}: {on}{example.reason}")
    return lines


def list_findings(scaling: Scaling, efficiency: float) -> list[str]:
    """Return sentences: the recommended number of ranks, what limits it, assumptions and extrapolations."""
    lines = ["", recommend(scaling, efficiency)]
    points, batch = scaling.strong.points, scaling.batch
    last = points[-1]
    if last.lost and last.lost.value > MIN_SHARE > last.efficiency - 1:
        lines.append(
            f"on {last.ranks:,} ranks, {last.lost.name} is the largest loss:"
            f" {last.lost.value:.0%} of the time of all devices"
        )
    best = max(points, key=lambda point: point.efficiency)
    if best.efficiency > 1 + MIN_SHARE:
        lines.append(_explain_gain(scaling, best))
    if last.ranks > batch:
        threshold = next(point.ranks for point in points if point.ranks > batch)
        lines.append(
            f"from {threshold:,} ranks on, a batch of {batch:,} has fewer samples than ranks:"
            " ranks share samples by tp, pp or cp"
        )
    largest = scaling.weak.points[-1] if scaling.weak.points else None
    if largest and largest.batch > batch:
        tokens = (
            f" ({format_count(largest.batch * scaling.facts.tokens)} tokens)"
            if scaling.facts.tokens > 1
            else ""
        )
        size = f"{largest.batch:,}{tokens}"
        lines.append(
            f"weak scaling ends at a batch of {size}: whether a batch of that size learns as much per sample"
            " is not predicted"
        )
    lines += scaling.assumed
    if guesses := dict.fromkeys(
        guess
        for curve in (scaling.strong, scaling.weak)
        for point in curve.points
        for guess in point.cost.time.guesses
    ):
        lines.append("extrapolated: " + "; ".join(guesses))
    return lines


def _explain_gain(scaling: Scaling, best: ScalingPoint) -> str:
    """Return a sentence that says why a rank does more among more ranks: memory, or the part that shrank."""
    first = scaling.strong.points[0]
    gain = first.cost.step_s * first.ranks / (best.cost.step_s * best.ranks)
    if scaling.memory_speedup**2 >= gain:  # at least half of the gain, on a logarithmic scale
        return (
            f"above 100%: faster plans need more memory than {several(first.ranks, 'rank')} have; "
            "more ranks have it, for plans that recompute less or wait less"
        )
    device_s = [
        {part.name: part.value * point.ranks for part in point.cost.time.parts} for point in (first, best)
    ]
    saved = {name: seconds - device_s[1].get(name, 0.0) for name, seconds in device_s[0].items()}
    part = max(saved, key=lambda name: saved[name])
    return (
        f"above 100%: on {several(best.ranks, 'rank')}, {part} is the largest gain: "
        f"{saved[part] / sum(device_s[0].values()):.0%} of the time of all devices on {first.ranks:,}"
    )


def recommend(scaling: Scaling, efficiency: float) -> str:
    """Return a sentence that recommends the largest number of ranks with the requested efficiency."""
    points = scaling.strong.points
    best = find_last_efficient(scaling.strong, efficiency)
    ranks = several(best.ranks, "rank")
    if len(points) == 1:
        return f"only {ranks} {'is' if best.ranks == 1 else 'are'} possible: {_describe_duration(best)}"
    if best is points[0]:
        why = f"with more ranks, the efficiency is below {efficiency:.0%}"
    else:
        why = (
            f"the most with an efficiency of {efficiency:.0%} or more, compared with {points[0].ranks:,}"
            f" ({best.efficiency:.0%})"
        )
    larger = next((point for point in points if point.ranks > best.ranks), None)
    line = f"recommended: {ranks}, {why}; {_describe_duration(best)}"
    if larger is None:
        return line
    time_share = larger.cost.step_s / best.cost.step_s
    return (
        f"{line}. {larger.ranks:,} would take {time_share:.0%} of the time and"
        f" {best.efficiency / larger.efficiency - 1:.0%} more device-hours"
    )


def _describe_duration(point: ScalingPoint) -> str:
    bill = point.bill
    if bill is None:
        return f"a step takes {format_seconds(point.cost.step_s)}"
    price = f", at a price of {format_amount(bill.price)} {bill.currency}" if bill.price is not None else ""
    return (
        f"the training takes {format_duration(bill.seconds)} and"
        f" {format_amount(bill.device_hours)} device-hours{price}"
    )


def format_amount(value: float) -> str:
    """Return an amount of hours, energy or money, with at most three decimal places."""
    return "<0.001" if 0 < value < 1e-3 else f"{value:.3f}" if value < 1 else format_count(value)


def format_duration(seconds: float) -> str:
    """Return the duration of a training: years, days, hours, or as `format_seconds`."""
    if seconds >= 2 * YEAR_S:
        return f"{seconds / YEAR_S:,.1f} years"
    return (
        f"{seconds / DAY_S:,.1f} days"
        if seconds >= 2 * DAY_S
        else f"{seconds / 3600:,.1f} h"
        if seconds >= 7200
        else format_seconds(seconds)
    )


def as_tree(scaling: Scaling, efficiency: float) -> dict[str, Any]:
    """Return both curves and the recommendation for JSON; docs/json.md lists the keys."""
    whole: dict[str, Any] = {
        "model": scaling.facts.name,
        "parameters": scaling.facts.params,
        "source": scaling.facts.source,
    }
    whole |= {
        "cluster": scaling.cluster.name,
        "device": scaling.cluster.device.name,
        "ranks_of_a_node": scaling.cluster.ranks_per_node,
    }
    whole |= {"tokens_per_sample": scaling.facts.tokens, "tokens": scaling.tokens, "assumed": scaling.assumed}
    whole |= {"efficiency": efficiency, "ask_for": find_last_efficient(scaling.strong, efficiency).ranks}
    for name, curve in (("strong", scaling.strong), ("weak", scaling.weak)):
        points = [_point(point) for point in curve.points]
        whole[name] = {
            "points": points,
            "refused": [
                {"ranks": count.ranks, "want": count.want, "reason": count.reason} for count in curve.refused
            ],
        }
    return whole


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
    return figures | ({"bill": bill_as_json(point.bill)} if point.bill else {})


def bill_as_json(bill: Bill) -> dict[str, float | None]:
    """Return seconds, device-hours, energy, price and CO₂ of a training."""
    return asdict(bill)

"""Measured scaling as text and JSON."""

from typing import Any

from rich.table import Table

from paceline.short_runs.scaling import MeasuredCurve, MeasuredPoint, MeasuredScaling, judge
from paceline.short_runs.serial_share import SerialShare
from paceline.units import format_seconds, several


def build_tables(scaling: MeasuredScaling) -> list[Table | str]:
    """Return the tables of strong and weak scaling, the plans, and the sentences about each curve."""
    each = f"{scaling.each.numerator:,}"
    if scaling.each.denominator != 1:
        each += f"/{scaling.each.denominator:,}"
    plans = {(point.run.ranks, point.run.batch): point.run.plan for point in scaling.runs}
    return [
        f"\nmeasured strong scaling: a batch of {scaling.batch:,} on any number of ranks",
        _build_table(scaling.strong),
        *scaling.strong.failed,
        *describe_serial(scaling.strong.serial, "Amdahl"),
        f"\nmeasured weak scaling: {each} samples of the batch per rank",
        _build_table(scaling.weak),
        *(reason for reason in scaling.weak.failed if reason not in scaling.strong.failed),
        *describe_serial(scaling.weak.serial, "Gustafson"),
        "\nplans",
        *(f"{ranks:>5,}  {batch:>8,}  {plan}" for (ranks, batch), plan in sorted(plans.items())),
    ]


def _build_table(curve: MeasuredCurve) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("ranks", "batch", "step", "±", "predicted", "error", "speed-up", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in curve.points:
        run = point.run
        table.add_row(
            f"{run.ranks:,}",
            f"{run.batch:,}",
            format_seconds(run.step_s),
            f"{run.error:.0%}",
            format_seconds(point.predicted.step_s),
            f"{point.predicted.step_s / run.step_s - 1:+.0%}",
            f"{point.speedup:.2f}",
            f"{point.efficiency:.0%}",
        )
    return table


def describe_serial(serial: SerialShare | None, law: str) -> list[str]:
    if serial is None:
        return []
    interval = f"95 %: {serial.low:.0%} to {serial.high:.0%}"
    sentence = f"serial share by {law}'s law: {serial.share:.0%} ({interval})"
    if law == "Amdahl" and serial.share > 0:
        most = f"{1 / serial.share:.1f}"
        sentence += (
            "; more ranks would not be faster than the fewest"
            if most == "1.0"
            else f"; no number of ranks would be more than {most} times as fast as the fewest"
        )
    return [sentence]


def list_findings(scaling: MeasuredScaling, efficiency: float) -> list[str]:
    """Return whether more ranks pay, and which number of ranks is recommended."""
    verdict = judge(scaling.strong.points, efficiency)
    lines = [verdict.sentence]
    if len(scaling.strong.points) > 1:
        lines.append(f"recommended: {several(verdict.ranks, 'rank')}")
    return ["", *lines]


def as_tree(scaling: MeasuredScaling, efficiency: float) -> dict[str, Any]:
    """Return the measurements as JSON; docs/json.md lists the keys."""
    verdict = judge(scaling.strong.points, efficiency)
    return {
        "batch": scaling.batch,
        "strong": _curve_as_tree(scaling.strong),
        "weak": _curve_as_tree(scaling.weak),
        "pays": verdict.pays,
        "verdict": verdict.sentence,
        "recommended_ranks": verdict.ranks,
    }


def _curve_as_tree(curve: MeasuredCurve) -> dict[str, Any]:
    return {
        "points": [_point_as_tree(point) for point in curve.points],
        "failed": list(curve.failed),
        "serial_share": curve.serial._asdict() if curve.serial is not None else None,
    }


def _point_as_tree(point: MeasuredPoint) -> dict[str, Any]:
    run = point.run
    return {
        "ranks": run.ranks,
        "batch": run.batch,
        "plan": str(run.plan),
        "step_s": run.step_s,
        "step_error": run.error,
        "steps": run.steps,
        "seconds": run.seconds,
        "predicted_s": point.predicted.step_s,
        "predicted_error": point.predicted.time.error,
        "speedup": point.speedup,
        "efficiency": point.efficiency,
    }

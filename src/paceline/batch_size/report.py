"""Results of a comparison of batches as text and JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from paceline.batch_size.choose import Choice
from paceline.batch_size.convergence import ConvergenceCurve, Interval
from paceline.batch_size.published import PublishedTraining
from paceline.batch_size.result import WIDEST, BatchResult
from paceline.batch_size.target import Target
from paceline.events import NoiseMeasured
from paceline.report.text import format_noise
from paceline.units import format_seconds, several


def build_table(results: Sequence[BatchResult], curve: ConvergenceCurve | None) -> Table:
    """Return a row for each batch, with the samples that the fit has beside those that were needed.

    best: value of the metric. The table fits 80 columns, because a number that is cut off is wrong.
    """
    has_noise = any(result.noise is not None for result in results)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("batch", "lr", "steps", "samples", "fit", "time", "best")
    for name in (*names, "noise") if has_noise else names:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        cells = [
            f"{result.batch:,}",
            f"{result.lr:.3g}" if result.lr is not None else "–",
            f"{result.steps:,.0f}" if result.steps is not None else f"not in {result.done - result.first:,}",
            f"{result.samples:,.0f}" if result.samples is not None else "–",
            f"{curve.form(result.batch):,.0f}" if curve is not None else "–",
            format_seconds(result.seconds) if result.seconds is not None else "–",
            f"{result.best:.4g}" if result.best is not None else "–",
        ]
        table.add_row(*cells, *([_format_noise(result.noise)] if has_noise else []))
    return table


def _format_noise(noise: NoiseMeasured | None) -> str:
    if noise is None or noise.noise_scale is None:
        return "–"
    return format_noise(noise).removesuffix(" samples")


def list_findings(
    results: Sequence[BatchResult], target: Target, curve: ConvergenceCurve | None
) -> list[str]:
    """Return sentences: batches that missed the target, the fit, and the batch from which more cost."""
    lines = [
        f"batch {result.batch:,} did not reach {target}: the best was {_best(result)}"
        + (f"; {result.why}" if result.why else "")
        for result in results
        if result.steps is None
    ]
    lines += [
        f"batch {result.batch:,}: the best learning rate is {result.lr_factor:g} times the scaled one, and "
        "--tune tries no further; choose another --lr or schedule.lr_scale"
        for result in results
        if result.lr_factor in (WIDEST, 1 / WIDEST)
    ]
    if early := [f"{result.batch:,}" for result in results if result.is_early]:
        lines.append(
            f"the first evaluation of batch {', '.join(early)} already reached {target}, so these steps are "
            "an upper limit; use smaller --evaluate-samples"
        )
    if curve is None:
        return [*lines, f"no batch reached {target}; train longer with --epochs, or choose another --until"]
    critical, minimum = curve.critical_batch, curve.minimum
    lines += [
        f"samples to {target} = {_interval(minimum)} × (1 + batch / {_interval(critical)})",
        f"knee: at batch {critical.value:,.0f} a training needs twice the samples of small batches and twice "
        f"the steps of huge ones; up to batch {critical.value / 5:,.0f} it needs at most 20 % more samples",
    ]
    reached = [result for result in results if result.steps is not None]
    if len(reached) < 3:
        lines.append(
            f"only {len(reached)} {'batch' if len(reached) == 1 else 'batches'} reached the target, so the "
            "fit is mostly an assumption; add batches"
        )
    elif critical.value > 2 * max(result.batch for result in reached):
        lines.append("the knee is beyond the measured batches, so it is extrapolated; add larger batches")
    noises = [result.noise.noise_scale for result in results if result.noise is not None]
    if known := [noise for noise in noises if noise is not None]:
        lines.append(
            f"the gradient noise scale was {min(known):,.3g} to {max(known):,.3g} samples at the end of the "
            "trainings; it estimates the same batch from gradients"
        )
    return lines


def describe_choices(best: Mapping[str, Choice], measured: Sequence[int]) -> list[str]:
    """Return a line for the least predicted time, energy and price."""
    lines = []
    for name, choice in best.items():
        amounts = [f"{choice.bill.device_hours:.3g} device hours"]
        if choice.bill.kWh is not None:
            amounts.append(f"{choice.bill.kWh:.3g} kWh")
        if choice.bill.price is not None:
            amounts.append(f"price {choice.bill.price:.4g} {choice.bill.currency}")
        extrapolated = ", extrapolated" if choice.batch not in measured else ""
        lines.append(
            f"least {name}: batch {choice.batch:,}{extrapolated}, {several(choice.ranks, 'rank')}, "
            f"plan {choice.plan}: {format_seconds(choice.seconds.value)} "
            f"({format_seconds(choice.seconds.low)} to {format_seconds(choice.seconds.high)}), "
            f"{', '.join(amounts)} (predicted)"
        )
    return lines


def build_published_table(rows: Sequence[PublishedTraining]) -> Table:
    """Return published trainings of the task."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("batch", "steps", "accuracy", "optimizer", "source"):
        table.add_column(name, justify="left" if name in ("optimizer", "source") else "right")
    for row in rows:
        table.add_row(f"{row.batch:,}", f"{row.steps:,}", f"{row.accuracy:.1%}", row.optimizer, row.source)
    return table


def _best(result: BatchResult) -> str:
    return f"{result.best:.4g} at step {result.best_step}" if result.best is not None else "not a number"


def _interval(interval: Interval) -> str:
    return f"{interval.value:,.0f} ({interval.low:,.0f} to {interval.high:,.0f})"


def as_json(
    results: Sequence[BatchResult], target: Target, curve: ConvergenceCurve | None, best: Mapping[str, Choice]
) -> dict[str, Any]:
    """Return the results as JSON."""
    return {
        "until": {"metric": target.name, "value": target.value, "direction": target.metric.split()[0]},
        "rows": [_row(result, curve) for result in results],
        "fit": None
        if curve is None
        else {
            "minimum_samples": vars(curve.minimum),
            "critical_batch": vars(curve.critical_batch),
            "knee": curve.critical_batch.value,
        },
        "choices": {
            name: {
                "batch": choice.batch,
                "ranks": choice.ranks,
                "plan": choice.plan,
                "step_s": choice.step_s,
                "steps": vars(choice.steps),
                "seconds": vars(choice.seconds),
                "kWh": choice.bill.kWh,
                "price": choice.bill.price,
                "device_hours": choice.bill.device_hours,
            }
            for name, choice in best.items()
        },
    }


def _row(result: BatchResult, curve: ConvergenceCurve | None) -> dict[str, Any]:
    noise = result.noise
    return {
        "batch": result.batch,
        "lr": result.lr,
        "lr_factor": result.lr_factor,
        "reached": result.steps is not None,
        "is_early": result.is_early,
        "steps": result.steps,
        "samples": result.samples,
        "seconds": result.seconds,
        "step_s": result.step_s,
        "steps_done": result.done - result.first,
        "best": result.best,
        "best_step": result.best_step,
        "noise_scale": noise.noise_scale if noise is not None else None,
        "fitted_samples": curve.form(result.batch) if curve is not None else None,
        "why": result.why,
    }

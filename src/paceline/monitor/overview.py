"""Samples in a short table: mean and extremes of the columns that matter most."""

from paceline.monitor.columns import MAIN_COLUMNS, kind_of
from paceline.monitor.table import SampleTable
from paceline.units import several

KINDS = (*MAIN_COLUMNS, "step time", "rankN workers cpu")
MAX_ROWS = 40


def summarize_samples(samples: SampleTable) -> list[tuple[str, str, str, str]]:
    """Return rows of name with unit, mean, minimum and maximum. A column without values has no row."""
    names = sorted(
        (name for name in samples.columns if kind_of(name) in KINDS),
        key=lambda name: KINDS.index(kind_of(name)),
    )
    rows = []
    for name in names:
        values = samples.values(name)
        if values and (max(values) > 0 or kind_of(name) == "gpuN utilization"):
            unit = samples.units.get(name, "")
            numbers = (sum(values) / len(values), min(values), max(values))
            mean, least, most = map(_format, numbers)
            rows.append((f"{name} [{unit}]", mean, least, most))
    return rows[:MAX_ROWS]


def _format(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def describe_extent(samples: SampleTable) -> str:
    """Return the number of samples and their duration: `120 samples in 2:00`."""
    from paceline.units import format_seconds

    duration = f" in {format_seconds(samples.duration_s)}" if samples.duration_s else ""
    return several(len(samples), "sample") + duration

"""Rates of reading samples, as a table and as curves."""

from pathlib import Path

from rich.console import Console

from paceline.bench.report.bench import Column, build_table, field
from paceline.bench.report.compute import number
from paceline.bench.result import Result, Row
from paceline.plotting.figure import COLOURS, figure
from paceline.units import format_bytes

LOG_SCALE_RATIO = 20  # between fastest and slowest; above it, a linear scale would hide the slowest


def show(console: Console, result: Result) -> None:
    """Print a result."""
    console.print(
        build_table(
            [row for row in result.rows if "per_s" in row],
            [
                field("", "what", right=False),
                field("workers", "workers"),
                field("prefetch", "prefetch"),
                Column("samples/s", lambda row: f"{number(row, 'per_s'):,.0f}"),
                Column("share", lambda row: f"{number(row, 'share'):.0%}" if "share" in row else "—"),
                field("a sample", "sample_bytes"),
                Column("spread", lambda row: f"{number(row, 'spread'):.0%}" if "spread" in row else "—"),
                Column(
                    "waits",
                    lambda row: (
                        f"{number(row, 'wait_share'):.0%}" if row.get("wait_share") is not None else "—"
                    ),
                ),
                Column(
                    "first batch",
                    lambda row: f"{number(row, 'first_s'):.2f} s" if row.get("first_s") else "—",
                ),
                Column(
                    "memory",
                    lambda row: (
                        format_bytes(number(row, "memory_bytes"))
                        if row.get("memory_bytes") is not None
                        else "—"
                    ),
                ),
            ],
        )
    )
    for row in result.rows:
        if row["what"] == "order":
            console.print(describe_order(row), markup=False, soft_wrap=True)
    for row in result.summary:
        console.print(verdict(row), markup=False, soft_wrap=True)


def describe_order(row: Row) -> str:
    """Return the quality of the order of the samples as a sentence."""
    correlation = row.get("label_correlation")
    labels = (
        f", correlation of the labels of neighbors {correlation:.2f}"
        if isinstance(correlation, float)
        else ""
    )
    return (
        f"order {row['shuffle']}: mean displacement {number(row, 'displacement'):.0%} of that of a random"
        f" order{labels}"
    )


def verdict(row: Row) -> str:
    """Return whether reading limits the training, and the number of workers from which it no longer does."""
    waits, share = f"{number(row, 'wait_share'):.0%}", f"{number(row, 'share_of_step'):.0%}"
    if row["limits"]:
        return (
            f"reading is the limit: with {_setting(row)} the step still waits {waits} of the time, "
            f"and reaches {share} of its speed without reading"
        )
    return (
        f"reading is not the limit with {_setting(row)}: the step waits {waits} of the time, "
        f"and reaches {share} of its speed without reading"
    )


def _setting(row: Row) -> str:
    if not row["workers"]:
        return "no workers"
    return (
        f"{row['workers']} worker{'s' * (row['workers'] != 1)} and {row['prefetch']} batches of prefetch each"
    )


def draw(result: Result, path: Path) -> None:
    """Draw samples per second over workers, with the rate of the step as a line."""
    with figure(path, 8.0, 4.5) as drawn:
        axes = drawn.subplots()
        step = next((row for row in result.rows if row["what"] == "step"), None)
        for what, style in (("read", "--"), ("read and step", "-")):
            rows = [row for row in result.rows if row["what"] == what]
            prefetches: list[int | None] = [
                *sorted({row["prefetch"] for row in rows if isinstance(row["prefetch"], int)})
            ] or [None]
            for colour, prefetch in zip(COLOURS, prefetches, strict=False):
                series = [row for row in rows if row["prefetch"] in (None, prefetch)]
                label = what if prefetch is None else f"{what}, prefetch {prefetch}"
                axes.plot(
                    [number(row, "workers") for row in series],
                    [number(row, "per_s") for row in series],
                    style,
                    marker="o",
                    color=colour,
                    label=label,
                )
        if step is not None:
            axes.axhline(number(step, "per_s"), color="#555555", linewidth=1)
            axes.annotate(
                "step without reading",
                (0, number(step, "per_s")),
                xytext=(0, 4),
                textcoords="offset points",
                color="#555555",
                fontsize=9,
            )
        shown = [row for row in result.rows if row["what"] in ("step", "read", "read and step")]
        rates = [number(row, "per_s") for row in shown]
        if max(rates) > LOG_SCALE_RATIO * min(rates):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({number(row, "workers") for row in shown if row["what"] != "step"}))
        axes.set_xlabel("workers")
        axes.set_ylabel("samples/s")
        axes.set_title(
            f"Data of {result.settings.get('task', '')}, batch {result.settings.get('batch', '')}",
            loc="left",
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)

"""What to keep in which directory."""

from collections.abc import Sequence
from typing import Any

from paceline.bench.result import Row
from paceline.bench.storage.suite import IN_MEMORY
from paceline.units import format_count

FEW_CREATES = 1000  # a second; below it, many small files are a bad idea
FEW_WRITES = 1000  # a second, each on the disk before the next
FEW_READS = 2000  # at random, a second


def advice(rows: Sequence[Row]) -> list[Row]:
    """A line for each directory, from what was measured of it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        figures = found.setdefault(str(row["directory"]), {"filesystem": row["filesystem"]})
        figures[str(row["test"])] = row.get("Bps", row.get("per_s"))
    lasting = {name: figures for name, figures in found.items() if figures["filesystem"] not in IN_MEMORY}
    quickest = (
        max(lasting, key=lambda name: lasting[name].get("checkpoint") or 0.0) if len(lasting) > 1 else None
    )
    return [
        {"directory": name, "advice": _line(figures, name == quickest)} for name, figures in found.items()
    ]


def _line(figures: dict[str, Any], quickest: bool) -> str:
    if figures["filesystem"] in IN_MEMORY:
        return "this is memory, which a job pays for and which is empty afterwards: put here what is read often, and keep nothing"
    creates, writes, reads, checkpoint = (
        figures.get(test) for test in ("create", "small write", "random read", "checkpoint")
    )
    found = []
    if quickest and checkpoint:
        found.append(f"keep checkpoints here, {format_count(checkpoint)}B/s is the most of these directories")
    if creates is not None and creates < FEW_CREATES:
        found.append(f"pack small files, at {creates:,.0f} a second they are slow to make")
    if reads is not None and reads < FEW_READS:
        found.append(f"read data in order, or from memory: {reads:,.0f} random reads a second are few")
    if writes is not None and writes < FEW_WRITES:
        found.append(f"no databases and no logs that wait for the disk: {writes:,.0f} writes a second")
    return "; ".join(found) or "good for data, also in small files, and for checkpoints"

"""Advice on what to keep in which directory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.result import Row
from paceline.bench.storage.suite import IN_MEMORY
from paceline.units import format_count

FEW_CREATES_PER_S = 1000  # below this, many small files are a bad idea
FEW_WRITES_PER_S = 1000  # each on the disk before the next
FEW_READS_PER_S = 2000  # at random
FEW_OPENS_PER_S = 2000
BACKUPS = {
    None: "",
    True: "; backed up: keep code and results here",
    False: "; not backed up: copy what you keep",
}
FILES_OF_ENVIRONMENT = 1300  # that a rank opens to import torch 2.13, counted by strace


def give_advice(
    rows: Sequence[Row], is_backed_up: Callable[[Path], bool | None] = lambda folder: None
) -> list[Row]:
    """Return a sentence for each directory, based on its measured rates.

    is_backed_up: returns what the site file says about a directory, None if nothing.
    """
    measured: dict[str, dict[str, Any]] = {}
    for row in rows:
        figures = measured.setdefault(str(row["directory"]), {"filesystem": row["filesystem"]})
        figures[str(row["test"])] = row.get("Bps", row.get("per_s"))
    persistent = {
        name: figures for name, figures in measured.items() if figures["filesystem"] not in IN_MEMORY
    }
    fastest = (
        max(persistent, key=lambda name: persistent[name].get("checkpoint") or 0.0)
        if len(persistent) > 1
        else None
    )
    return [
        {
            "directory": name,
            "advice": _describe(figures, name == fastest) + BACKUPS[is_backed_up(Path(name))],
        }
        for name, figures in measured.items()
    ]


def _describe(figures: dict[str, Any], is_fastest: bool) -> str:
    if figures["filesystem"] in IN_MEMORY:
        return (
            "in memory: it counts as memory of the job and is empty afterwards; "
            "use it for data that is read often, and keep nothing here"
        )
    creates, writes, reads, checkpoint, opens = (
        figures.get(test) for test in ("create", "small write", "random read", "checkpoint", "open")
    )
    advice = []
    if is_fastest and checkpoint:
        advice.append(
            f"keep checkpoints here: {format_count(checkpoint)}B/s is the fastest of these directories"
        )
    if creates is not None and creates < FEW_CREATES_PER_S:
        advice.append(f"pack small files: only {creates:,.0f} can be created per second")
    if reads is not None and reads < FEW_READS_PER_S:
        advice.append(f"read data in order, or from memory: only {reads:,.0f} random reads per second")
    if opens is not None and opens < FEW_OPENS_PER_S:
        advice.append(
            f"keep environments elsewhere, or in an image file: only {opens:,.0f} files can be opened per"
            f" second, and each rank opens {FILES_OF_ENVIRONMENT:,} to start"
        )
    if writes is not None and writes < FEW_WRITES_PER_S:
        advice.append(
            f"avoid databases and logs that wait for the disk: only {writes:,.0f} small writes per second"
        )
    return "; ".join(advice) or "suitable for data, including small files, and for checkpoints"

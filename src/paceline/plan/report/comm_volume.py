"""The communication volume of a step as text for a terminal, and as JSON."""

import json
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from paceline.plan.comm_volume import CommVolume, Entry, block_pattern
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.spec import Launch, Spec
from paceline.units import format_bytes


def heading(spec: Spec, launch: Launch, plan: ResolvedPlan) -> str:
    """`plan`: that of `launch`, its data degree said."""
    each = micro_batch_size(spec.batch, plan) * plan.microbatches
    return (
        f"{spec.task.rpartition('/')[2]}: one step of plan {launch.plan} on {launch.ranks:,} ranks, "
        f"batch {spec.batch:,} ({each:,} on a data rank), {spec.precision}"
    )


def tables(volumes: Sequence[CommVolume]) -> list[Table]:
    """One for each place on the axis of a pipeline, in order; neighbours that send the same share one."""
    found = []
    for lines, alike in groupby(enumerate(volumes), key=lambda item: _lines(item[1])):
        places, those = zip(*alike, strict=True)
        found.append(_table(lines, _title(places, those, len(volumes)) if len(volumes) > 1 else None))
    return found


def _title(places: Sequence[int], those: Sequence[CommVolume], of: int) -> str:
    ranks = ", ".join(f"{volume.rank:,}" for volume in those)
    if len(those) == 1:
        return f"pp {places[0]} of {of}: rank {ranks}"
    return f"pp {places[0]} to {places[-1]} of {of}: ranks {ranks}, each"


def _lines(volume: CommVolume) -> list[tuple[str, ...]]:
    """A line for each collective on each axis, and below it one for each module, those that are alike but for a number together."""
    lines: list[tuple[str, ...]] = []
    for (collective, axis, ranks), of_axis in groupby(
        volume.entries, key=lambda entry: (entry.collective, entry.axis, entry.ranks)
    ):
        entries = tuple(of_axis)
        lines.append((collective, axis, f"{ranks:,}", *_sums(entries)))
        lines += [(f"  {name}", "", "", *_sums(alike)) for name, alike in _alike(entries)]
    return [*lines, ("total", "", "", *_sums(volume.entries))]


def _table(lines: Sequence[tuple[str, ...]], title: str | None) -> Table:
    shown = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    shown.add_column("collective, module", overflow="fold")
    shown.add_column("axis", no_wrap=True)
    for name in ("ranks", "calls", "bytes", "sent"):
        shown.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(*line, style=None if line[0].startswith(" ") else "bold")
    return shown


def _alike(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Modules whose names differ by numbers only and that send the same, under one name; most bytes first."""
    found: dict[tuple[str, int, int], list[Entry]] = {}
    for entry in entries:
        found.setdefault((block_pattern(entry.module), entry.calls, entry.bytes), []).append(entry)
    named = [(_one_name([entry.module for entry in alike]), alike) for alike in found.values()]
    return sorted(named, key=lambda item: -sum(entry.bytes for entry in item[1]))


def _one_name(modules: list[str]) -> str:
    """`blocks.0.mlp.2`, `blocks.1.mlp.2` -> `blocks.*.mlp.2 × 2`."""
    if len(modules) == 1:
        return modules[0]
    columns = zip(*(module.split(".") for module in modules), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns) + f" × {len(modules)}"


def _sums(entries: Sequence[Entry]) -> tuple[str, str, str]:
    calls, size, sent = (
        sum(getattr(entry, field) for entry in entries) for field in ("calls", "bytes", "sent_bytes")
    )
    return f"{calls:,}", format_bytes(size), format_bytes(sent)


def as_json(spec: Spec, launch: Launch, volumes: Sequence[CommVolume]) -> str:
    facts = {"task": spec.task, "set": spec.set, "batch": spec.batch, "precision": spec.precision}
    facts |= {"plan": launch.plan, "ranks": launch.ranks}
    return json.dumps(facts | {"stages": [volume.as_json() for volume in volumes]}, indent=1) + "\n"

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
    """Return the title of the tables. plan: the plan of `launch`, resolved."""
    samples = micro_batch_size(spec.batch, plan) * plan.microbatches
    return (
        f"{spec.task.rpartition('/')[2]}: one step of plan {launch.plan} on {launch.ranks:,} ranks, "
        f"batch {spec.batch:,} ({samples:,} per data rank), {spec.precision}"
    )


def build_tables(volumes: Sequence[CommVolume]) -> list[Table]:
    """Return a table for each stage of the pipeline; neighbouring stages with equal volumes share a table."""
    tables = []
    for lines, group in groupby(enumerate(volumes), key=lambda item: _lines(item[1])):
        stages, equal_volumes = zip(*group, strict=True)
        title = _title(stages, equal_volumes, len(volumes)) if len(volumes) > 1 else None
        tables.append(_table(lines, title))
    return tables


def _title(stages: Sequence[int], volumes: Sequence[CommVolume], num_stages: int) -> str:
    ranks = ", ".join(f"{volume.rank:,}" for volume in volumes)
    if len(volumes) == 1:
        return f"pp {stages[0]} of {num_stages}: rank {ranks}"
    return f"pp {stages[0]} to {stages[-1]} of {num_stages}: ranks {ranks}, each"


def _lines(volume: CommVolume) -> list[tuple[str, ...]]:
    """Return a line for each collective on each axis, followed by lines for its modules."""
    lines: list[tuple[str, ...]] = []
    for (collective, axis, ranks), group in groupby(
        volume.entries, key=lambda entry: (entry.collective, entry.axis, entry.ranks)
    ):
        entries = tuple(group)
        lines.append((collective, axis, f"{ranks:,}", *_sums(entries)))
        lines += [(f"  {name}", "", "", *_sums(modules)) for name, modules in _group_modules(entries)]
    return [*lines, ("total", "", "", *_sums(volume.entries))]


def _table(lines: Sequence[tuple[str, ...]], title: str | None) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    table.add_column("collective, module", overflow="fold")
    table.add_column("axis", no_wrap=True)
    for name in ("ranks", "calls", "bytes", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line, style=None if line[0].startswith(" ") else "bold")
    return table


def _group_modules(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Return the entries by name of module, most bytes first.

    Modules that send the same and whose names differ only by numbers share a name.
    """
    groups: dict[tuple[str, int, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((block_pattern(entry.module), entry.calls, entry.bytes), []).append(entry)
    named = [(_common_name([entry.module for entry in group]), group) for group in groups.values()]
    return sorted(named, key=lambda item: -sum(entry.bytes for entry in item[1]))


def _common_name(modules: list[str]) -> str:
    """Return the common name: `blocks.0.mlp.2`, `blocks.1.mlp.2` -> `blocks.*.mlp.2 × 2`."""
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
    """Return the volumes as JSON; docs/json.md lists the keys."""
    facts = {"task": spec.task, "set": spec.set, "batch": spec.batch, "precision": spec.precision}
    facts |= {"plan": launch.plan, "ranks": launch.ranks}
    return json.dumps(facts | {"stages": [volume.as_json() for volume in volumes]}, indent=1) + "\n"

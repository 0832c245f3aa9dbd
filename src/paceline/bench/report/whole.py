"""What all benches found, in a line or two each."""

from collections.abc import Callable, Sequence

from rich.table import Table

from paceline.bench.report import host, input, overlap, storage
from paceline.bench.report.bench import three_digits
from paceline.bench.report.compute import MEMORY, kind, number, rate
from paceline.bench.result import Result, Row
from paceline.units import format_bytes, format_count

Line = tuple[str, str]  # what, how fast


def heading(result: Result) -> str:
    facts = result.machine
    return f"{facts.get('host')}: {facts.get('cpu')}, {facts.get('cores')} cores; torch {result.torch}; {result.when}"


def notes(results: Sequence[Result]) -> list[str]:
    """Of several that say the same, one."""
    said: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            said.setdefault(note, []).append(result.kind)
    return [f"{', '.join(kinds)}: {note}" for note, kinds in said.items()]


def table(results: Sequence[Result]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for result in results:
        shown.add_row(result.kind, style="bold")
        for what, how_fast in LINES[result.kind](result):
            shown.add_row(f"  {what}", how_fast)
    return shown


def _collectives(result: Result) -> list[Line]:
    """The quickest place of each operation and back end, as it is fitted."""
    found: dict[str, Row] = {}
    for row in result.summary:
        name = f"{row['operation']}, {row['backend']}, {row['ranks']} ranks"
        if name not in found or number(row, "beta_Bps") > number(found[name], "beta_Bps"):
            found[name] = row
    return [
        (name, f"{three_digits(number(row, 'alpha_s'))} a call, {format_count(number(row, 'beta_Bps'))}B/s")
        for name, row in found.items()
    ]


def _compute(result: Result) -> list[Line]:
    lines = []
    for row in result.summary:
        typical = f", typically {rate(row, 'typical_flops')}" if row.get("typical_flops") else ""
        share = f", {number(row, 'peak_share'):.0%} of what is published" if row.get("peak_share") else ""
        lines.append((f"products of {kind(row)}", f"{rate(row)} at {row['shape']}{share}{typical}"))
    for name in MEMORY:
        lines += [(f"memory, {name}", rate(row, "Bps")) for row in result.rows if row["operation"] == name]
    for name in ("attention", "attention backward"):
        rows = [row for row in result.rows if row["operation"] == name]
        if rows:
            best = max(rows, key=lambda row: number(row, "flops"))
            lines.append((name, f"{rate(best)} with {best['kernel']} in {best['dtype']} at {best['shape']}"))
    lines += [
        ("step", f"{number(row, 'per_s'):,.0f} samples/s")
        for row in result.rows
        if row["operation"] == "step"
    ]
    return lines


def _host(result: Result) -> list[Line]:
    return [(name, f"{three_digits(start)} and more") for name, start in host.starts(result)] + [
        (name, three_digits(seconds)) for name, seconds in host.added(result)
    ]


def _overlap(result: Result) -> list[Line]:
    return [(overlap.name(row), _hidden(number(row, "hidden"))) for row in result.rows]


def _hidden(share: float) -> str:
    return (
        f"{min(share, 1.0):.0%} hidden under computing"
        if share >= 0.005
        else "nothing hidden under computing: in each other's way"
    )


def _storage(result: Result) -> list[Line]:
    lines = []
    for name in storage.directories(result):
        rows = [row for row in result.rows if row["directory"] == name]
        figures = ", ".join(f"{row['test']} {storage.cell(row)}" for row in rows if row["test"] in TOLD)
        lines.append(
            (
                f"{name}, {rows[0]['filesystem']}",
                f"{format_bytes(number(rows[0], 'free_bytes'))} free; {figures}",
            )
        )
        lines += [("", str(row["advice"])) for row in result.summary if row["directory"] == name]
    return lines


TOLD = ("large write", "read", "small write", "create", "checkpoint")


def _input(result: Result) -> list[Line]:
    return [
        (f"{result.settings.get('task')}, batch {result.settings.get('batch')}", input.verdict(row))
        for row in result.summary
    ]


LINES: dict[str, Callable[[Result], list[Line]]] = {
    "collectives": _collectives,
    "compute": _compute,
    "host": _host,
    "overlap": _overlap,
    "storage": _storage,
    "input": _input,
}

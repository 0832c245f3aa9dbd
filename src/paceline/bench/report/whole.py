"""Summary of all benches, in a line or two each."""

from collections.abc import Callable, Sequence

from rich.table import Table

from paceline.bench.report import data, host, overlap, storage
from paceline.bench.report.bench import three_digits
from paceline.bench.report.compute import MEMORY, format_rate, matmul_name, number
from paceline.bench.result import Result, Row
from paceline.units import format_bytes, format_count

Line = tuple[str, str]  # (what was measured, its rate or time)


def heading(result: Result) -> str:
    """Return the line above the summary: machine, torch and time."""
    facts = result.machine
    machine = f"{facts.get('host')}: {facts.get('cpu')}, {facts.get('cores')} cores"
    return f"{machine}; torch {result.torch}; {result.when}"


def merge_notes(results: Sequence[Result]) -> list[str]:
    """Return the notes of all benches; identical notes appear once, with the names of their benches."""
    kinds_by_note: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            kinds_by_note.setdefault(note, []).append(result.kind)
    return [f"{', '.join(kinds)}: {note}" for note, kinds in kinds_by_note.items()]


def summary_table(results: Sequence[Result]) -> Table:
    """Return a table with the main rates of each bench."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        table.add_row(result.kind, style="bold")
        for name, rate in LINES[result.kind](result):
            table.add_row(f"  {name}", rate)
    return table


def _collectives(result: Result) -> list[Line]:
    """Return the fit of each operation and back end, for the faster place."""
    fastest: dict[str, Row] = {}
    for row in result.summary:
        name = f"{row['operation']}, {row['backend']}, {row['ranks']} ranks"
        if name not in fastest or number(row, "beta_Bps") > number(fastest[name], "beta_Bps"):
            fastest[name] = row
    return [
        (name, f"{three_digits(number(row, 'alpha_s'))} per call, {format_count(number(row, 'beta_Bps'))}B/s")
        for name, row in fastest.items()
    ]


def _compute(result: Result) -> list[Line]:
    lines = []
    for row in result.summary:
        typical = f", typically {format_rate(row, 'typical_flops')}" if row.get("typical_flops") else ""
        share = f", {number(row, 'peak_share'):.0%} of the published peak" if row.get("peak_share") else ""
        lines.append(
            (f"products of {matmul_name(row)}", f"{format_rate(row)} at {row['shape']}{share}{typical}")
        )
    for name in MEMORY:
        lines += [
            (f"memory, {name}", format_rate(row, "Bps")) for row in result.rows if row["operation"] == name
        ]
    for name in ("attention", "attention backward"):
        rows = [row for row in result.rows if row["operation"] == name]
        if rows:
            best = max(rows, key=lambda row: number(row, "flops"))
            lines.append(
                (name, f"{format_rate(best)} with {best['kernel']} in {best['dtype']} at {best['shape']}")
            )
    lines += [
        ("step", f"{number(row, 'per_s'):,.0f} samples/s")
        for row in result.rows
        if row["operation"] == "step"
    ]
    return lines


def _host(result: Result) -> list[Line]:
    return [(name, f"at least {three_digits(seconds)}") for name, seconds in host.launch_times(result)] + [
        (name, three_digits(seconds)) for name, seconds in host.engine_overheads(result)
    ]


def _overlap(result: Result) -> list[Line]:
    return [(overlap.row_name(row), _format_hidden(number(row, "hidden"))) for row in result.rows]


def _format_hidden(share: float) -> str:
    if share >= 0.005:
        return f"{min(share, 1.0):.0%} hidden behind computation"
    return "not hidden behind computation: both slow each other down"


def _storage(result: Result) -> list[Line]:
    lines = []
    for name in storage.directories(result):
        rows = [row for row in result.rows if row["directory"] == name]
        figures = ", ".join(
            f"{row['test']} {storage.format_cell(row)}" for row in rows if row["test"] in SHOWN_TESTS
        )
        lines.append(
            (
                f"{name}, {rows[0]['filesystem']}",
                f"{format_bytes(number(rows[0], 'free_bytes'))} free; {figures}",
            )
        )
        lines += [("", str(row["advice"])) for row in result.summary if row["directory"] == name]
    return lines


SHOWN_TESTS = ("large write", "read", "small write", "create", "checkpoint")


def _data(result: Result) -> list[Line]:
    return [
        (f"{result.settings.get('task')}, batch {result.settings.get('batch')}", data.verdict(row))
        for row in result.summary
    ]


LINES: dict[str, Callable[[Result], list[Line]]] = {
    "collectives": _collectives,
    "compute": _compute,
    "host": _host,
    "overlap": _overlap,
    "storage": _storage,
    "data": _data,
}

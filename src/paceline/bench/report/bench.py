"""Bench results as tables for a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench.compare import Comparison, quartiles
from paceline.bench.result import Result, Row, Value
from paceline.units import format_bytes, several, without_controls


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and the text of a row in it."""

    title: str
    show: Callable[[Row], str]
    right: bool = True


def field(title: str, name: str, show: Callable[[Value], str] | None = None, right: bool = True) -> Column:
    """Return a column with one field of a row, and a dash if the field is absent."""
    show = show or (lambda value: as_text(name, value))
    return Column(title, lambda row: "—" if row.get(name) is None else show(row[name]), right)


def as_text(name: str, value: Value) -> str:
    """Format a value by the unit in the name of its field."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name == "bytes" or name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s"):
        return three_digits(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def three_digits(seconds: float) -> str:
    """Format seconds with three digits: 0.0000042 -> `"4.2 µs"`, 0.01234 -> `"12.3 ms"`, 75 -> `"75 s"`."""
    for unit, in_seconds in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if seconds < 999.5 * in_seconds or unit == "s":
            break
    return f"{seconds / in_seconds:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} s"


def build_table(rows: Sequence[Row], columns: Sequence[Column], title: str | None = None) -> Table:
    """Return a table of the rows, without columns that are a dash in all rows."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    cells = [[column.show(row) for row in rows] for column in columns]
    kept = [(column, texts) for column, texts in zip(columns, cells, strict=True) if set(texts) != {"—"}]
    for column, _ in kept:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for texts in zip(*(texts for _, texts in kept), strict=True):
        table.add_row(*(Text(without_controls(text)) for text in texts))  # a folder may be named [/x]
    return table


def heading(result: Result) -> str:
    """Return the line above a result: bench, machine, torch and time."""
    facts = result.machine
    torch = f"; torch {result.torch}" if result.torch else ""
    machine = f"{facts.get('host')}: {facts.get('cpu')}, {facts.get('cores')} cores"
    return f"bench {result.kind} on {machine}{torch}; {result.when}"


def show_notes(console: Console, result: Result) -> None:
    """Print the notes of a result."""
    for note in result.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)


def comparison_table(first: Result, second: Result, comparison: Comparison) -> Table:
    """Return a table with the ratio of times of each shared row."""
    columns = [field(name, name, right=name == "bytes") for name in first.keys]
    pairs = {first.key(ratio.first): ratio for ratio in comparison.ratios}
    columns += [
        field("first", "median_s"),
        Column("second", lambda row: as_text("median_s", pairs[first.key(row)].second["median_s"])),
        Column("ratio", lambda row: f"{pairs[first.key(row)].ratio:.3f}"),
        Column("±", lambda row: f"{pairs[first.key(row)].spread:.3f}"),
    ]
    return build_table([ratio.first for ratio in comparison.ratios], columns)


def comparison_summary(comparison: Comparison) -> str:
    """Return a line with the quartiles of the ratios."""
    low, median, high = quartiles(comparison.ratios)
    unmatched = [
        f"{count} only in the {which}"
        for count, which in ((comparison.only_first, "first"), (comparison.only_second, "second"))
        if count
    ]
    rows = several(len(comparison.ratios), "row")
    return (
        f"time in the first / time in the second: {median:.3f} (quartiles {low:.3f}–{high:.3f}) over {rows}"
        + "".join(f"; {text}" for text in unmatched)
    )

"""Results of benches as text for a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from paceline.bench.compare import Comparison, quartiles
from paceline.bench.result import Result, Row, Value
from paceline.units import format_bytes, several


@dataclass(frozen=True)
class Column:
    title: str
    show: Callable[[Row], str]
    right: bool = True


def field(title: str, name: str, show: Callable[[Value], str] | None = None, right: bool = True) -> Column:
    """A column with one field of a row; what is absent is a dash."""
    show = show or (lambda value: as_text(name, value))
    return Column(title, lambda row: "—" if row.get(name) is None else show(row[name]), right)


def as_text(name: str, value: Value) -> str:
    """By the unit in the name of a field."""
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
    """0.0000042 -> `"4.2 µs"`, 0.01234 -> `"12.3 ms"`, 75 -> `"75 s"`."""
    for unit, in_seconds in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if seconds < 999.5 * in_seconds or unit == "s":
            break
    return f"{seconds / in_seconds:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} s"


def table(rows: Sequence[Row], columns: Sequence[Column], title: str | None = None) -> Table:
    """Columns that show the same dash in all rows are left out."""
    shown = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    cells = [[column.show(row) for row in rows] for column in columns]
    kept = [(column, texts) for column, texts in zip(columns, cells, strict=True) if set(texts) != {"—"}]
    for column, _ in kept:
        shown.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for texts in zip(*(texts for _, texts in kept), strict=True):
        shown.add_row(*texts)
    return shown


def heading(result: Result) -> str:
    facts = result.machine
    torch = f"; torch {result.torch}" if result.torch else ""
    return f"bench {result.kind} on {facts.get('host')}: {facts.get('cpu')}, {facts.get('cores')} cores{torch}; {result.when}"


def show_notes(console: Console, result: Result) -> None:
    for note in result.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)


def comparison(first: Result, second: Result, found: Comparison) -> Table:
    """Time in the first over time in the second, row by row."""
    columns = [field(name, name, right=name == "bytes") for name in first.keys]
    pairs = {first.key(one.first): one for one in found.ratios}
    columns += [
        field("first", "median_s"),
        Column("second", lambda row: as_text("median_s", pairs[first.key(row)].second["median_s"])),
        Column("ratio", lambda row: f"{pairs[first.key(row)].ratio:.3f}"),
        Column("±", lambda row: f"{pairs[first.key(row)].spread:.3f}"),
    ]
    return table([one.first for one in found.ratios], columns)


def closing(found: Comparison) -> str:
    low, median, high = quartiles(found.ratios)
    lacking = [
        f"{count} only in the {which}"
        for count, which in ((found.only_first, "first"), (found.only_second, "second"))
        if count
    ]
    rows = several(len(found.ratios), "row")
    return (
        f"time in the first / time in the second: {median:.3f} (quartiles {low:.3f}–{high:.3f}) over {rows}"
        + "".join(f"; {one}" for one in lacking)
    )

"""What operations and engines take of a CPU, as tables."""

from rich.console import Console

from paceline.bench.report.bench import Column, table, three_digits
from paceline.bench.report.compute import number
from paceline.bench.result import Result
from paceline.units import format_count


def show(console: Console, result: Result) -> None:
    operations = [row for row in result.rows if "operation" in row]
    engines = [row for row in result.rows if "engine" in row]
    if operations:
        columns = [
            Column("operation", lambda row: str(row["operation"]), right=False),
            Column("threads", lambda row: str(row["threads"])),
        ]
        columns += [
            Column("size", lambda row: format_count(number(row, "size"))),
            Column("least", lambda row: three_digits(number(row, "min_s"))),
        ]
        columns.append(Column("median", lambda row: three_digits(number(row, "median_s"))))
        console.print(table(operations, columns))
    if engines:
        columns = [
            Column("engine", lambda row: str(row["engine"]), right=False),
            Column("ranks", lambda row: str(row["ranks"])),
        ]
        columns += [
            Column("units", lambda row: format_count(number(row, "units"))),
            Column("tensors", lambda row: format_count(number(row, "tensors"))),
        ]
        columns += [Column("adds", lambda row: three_digits(number(row, "median_s")))]
        console.print()
        console.print(table(engines, columns))


def starts(result: Result) -> list[tuple[str, float]]:
    """The smallest operation of each kind on one thread: what it takes to start it."""
    found: dict[str, float] = {}
    for row in result.rows:
        if row.get("threads") == 1:
            found.setdefault(f"{row['operation']}, 1 thread", number(row, "min_s"))
    return [
        (name, seconds)
        for name, seconds in found.items()
        if name.split(",")[0] in ("move", "linear", "linear backward", "update")
    ]


def added(result: Result) -> list[tuple[str, float]]:
    """Of each engine with the most units."""
    rows = [row for row in result.rows if "engine" in row]
    return [
        (f"{row['engine']} on {row['ranks']} ranks, {row['units']:g} units", number(row, "median_s"))
        for row in {r["engine"]: r for r in rows}.values()
    ]

"""CPU times of operations and overheads of engines, as tables."""

from rich.console import Console

from paceline.bench.report.bench import Column, build_table, three_digits
from paceline.bench.report.compute import number
from paceline.bench.result import Result
from paceline.units import format_count


def show(console: Console, result: Result) -> None:
    """Print a result."""
    operations = [row for row in result.rows if "operation" in row]
    engines = [row for row in result.rows if "engine" in row]
    if operations:
        columns = [
            Column("operation", lambda row: str(row["operation"]), right=False),
            Column("threads", lambda row: str(row["threads"])),
            Column("size", lambda row: format_count(number(row, "size"))),
            Column("min", lambda row: three_digits(number(row, "min_s"))),
            Column("median", lambda row: three_digits(number(row, "median_s"))),
        ]
        console.print(build_table(operations, columns))
    if engines:
        columns = [
            Column("engine", lambda row: str(row["engine"]), right=False),
            Column("ranks", lambda row: str(row["ranks"])),
            Column("units", lambda row: format_count(number(row, "units"))),
            Column("tensors", lambda row: format_count(number(row, "tensors"))),
            Column("overhead", lambda row: three_digits(number(row, "median_s"))),
        ]
        console.print()
        console.print(build_table(engines, columns))


def launch_times(result: Result) -> list[tuple[str, float]]:
    """Return the time of the smallest operation of some kinds on one thread: the launch overhead."""
    times_s: dict[str, float] = {}
    for row in result.rows:
        if row.get("threads") == 1:
            times_s.setdefault(f"{row['operation']}, 1 thread", number(row, "min_s"))
    return [
        (name, seconds)
        for name, seconds in times_s.items()
        if name.split(",")[0] in ("move", "linear", "linear backward", "update")
    ]


def engine_overheads(result: Result) -> list[tuple[str, float]]:
    """Return the overhead of each engine, at its largest number of units."""
    rows = [row for row in result.rows if "engine" in row]
    return [
        (f"{row['engine']} on {row['ranks']} ranks, {row['units']:g} units", number(row, "median_s"))
        for row in {row["engine"]: row for row in rows}.values()
    ]

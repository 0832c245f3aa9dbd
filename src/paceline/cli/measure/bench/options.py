"""Shared options and steps of the bench commands: check, compare, report progress, save, print."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.distributed.world import World

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.bench.result import Result, Row
    from paceline.bench.suites import Watch


INTERRUPTED = 130  # exit status
PROGRESS_INTERVAL_S = 1.0  # between lines of progress if standard error is not a terminal
Option = typer.Option
Json = Annotated[Path | None, Option("--json", metavar="FILE", help="Write the result to this JSON file.")]
Plot = Annotated[
    Path | None, Option("--plot", metavar="FILE", help="Draw the result as SVG or PNG, by the file's ending.")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    Option("--compare", metavar="A B", help="Compare two JSON files instead of measuring."),
]


def begin(kind: str, compare: tuple[Path, Path] | None, json: Path | None, plot: Path | None = None) -> None:
    """Begin a bench command: with --compare, print the comparison and exit; else check the output files.

    Raises BenchError if the files cannot be compared, or if the result cannot be written.
    """
    if compare is not None:
        _compare_results(kind, compare)
        raise typer.Exit
    from paceline.plotting.figure import check_picture
    from paceline.plotting.paths import check_path

    check_path(json)
    check_picture(plot)


def save_and_print(
    result: "Result",
    json: Path | None,
    plot: Path | None,
    show: "Callable[[Console, Result], None]",
    draw: "Callable[[Result, Path], None]",
    me: World | None = None,
) -> None:
    """Write a result to `json`, print it, and draw it to `plot`."""
    from paceline.bench.report.bench import heading, show_notes
    from paceline.bench.result import write

    if json is not None:
        write(result, json)  # first: an interrupted mpirun leaves its ranks only a second
    console = make_console(me)
    console.print(heading(result), markup=False, soft_wrap=True)
    show(console, result)
    show_notes(console, result)
    if plot is not None:
        draw(result, plot)


def _compare_results(kind: str, files: tuple[Path, Path]) -> None:
    """Print the ratios of two results."""
    from paceline.bench.compare import compare
    from paceline.bench.report.bench import comparison_summary, comparison_table, heading
    from paceline.bench.result import read

    first, second = (read(file, kind) for file in files)
    comparison = compare(first, second)
    console = make_console()
    for name, result in (("first:  ", first), ("second: ", second)):
        console.print(name + heading(result), markup=False, soft_wrap=True)
    console.print(comparison_table(first, second, comparison))
    console.print(comparison_summary(comparison), markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(initial: str, me: World | None = None) -> "Iterator[Watch]":
    """Yield a function that reports each measured row on standard error.

    On a terminal it updates a status line; elsewhere it prints a line at most every PROGRESS_INTERVAL_S.
    """
    console = make_console(me, stderr=True)
    last = float("-inf")
    with console.status(initial) as status:

        def report(row: "Row") -> None:
            nonlocal last
            text = f"measuring: {' '.join(str(row[key]) for key in list(row)[:4] if row[key] is not None)}"
            status.update(text)
            if not console.is_terminal and time.monotonic() > last + PROGRESS_INTERVAL_S:
                last = time.monotonic()
                console.print(text, markup=False)

        yield report


def make_console(me: World | None = None, stderr: bool = False) -> "Console":
    """Return a console that prints on rank 0 only.

    Under mpirun and srun it is never a terminal: they may give rank 0 a terminal even if its output goes to a
    file.
    """
    from rich.console import Console

    under_mpi_or_slurm = me is not None and me.launcher not in (None, "torchrun")
    return Console(
        stderr=stderr,
        soft_wrap=stderr,
        highlight=False,
        emoji=False,
        quiet=me is not None and me.rank > 0,
        force_terminal=False if under_mpi_or_slurm else None,
    )

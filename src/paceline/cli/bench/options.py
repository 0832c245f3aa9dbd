"""The options of all bench commands, and what is done with them."""

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
LINES_S = 1.0  # between lines of progress where nobody watches a terminal
Option = typer.Option
Json = Annotated[Path | None, Option("--json", metavar="FILE", help="Write the figures there, too.")]
Plot = Annotated[
    Path | None, Option("--plot", metavar="FILE", help="Draw them, as SVG or PNG by the file's ending.")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    Option("--compare", metavar="A B", help="Measure nothing; hold two JSON files together."),
]


def check(json: Path | None, plot: Path | None) -> None:
    """Raises BenchError before anything is measured where its figures could not be kept."""
    from paceline.plotting.figure import check_picture
    from paceline.plotting.paths import check_path

    check_path(json)
    check_picture(plot)


def keep(
    result: "Result",
    json: Path | None,
    plot: Path | None,
    show: "Callable[[Console, Result], None]",
    draw: "Callable[[Result, Path], None]",
    me: World | None = None,
) -> None:
    """Print a result, and write and draw it where that was asked for."""
    from paceline.bench.report.bench import heading, show_notes
    from paceline.bench.result import write

    if json is not None:
        write(result, json)  # first: mpirun leaves its ranks a second when it is interrupted
    console = terminal(me)
    console.print(heading(result), markup=False, soft_wrap=True)
    show(console, result)
    show_notes(console, result)
    if plot is not None:
        draw(result, plot)


def compare_results(kind: str, files: tuple[Path, Path]) -> None:
    """Print the ratios of two results."""
    from paceline.bench.compare import compare
    from paceline.bench.report.bench import closing, comparison, heading
    from paceline.bench.result import read

    first, second = (read(file, kind) for file in files)
    found = compare(first, second)
    console = terminal()
    for name, result in (("first:  ", first), ("second: ", second)):
        console.print(name + heading(result), markup=False, soft_wrap=True)
    console.print(comparison(first, second, found))
    console.print(closing(found), markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(at_first: str, me: World | None = None) -> "Iterator[Watch]":
    """Yield what reports a row that was just measured: on a terminal in place, else a line at most once in LINES_S."""
    console = terminal(me, stderr=True)
    last = float("-inf")
    with console.status(at_first) as status:

        def tell(row: "Row") -> None:
            nonlocal last
            said = f"measuring: {' '.join(str(row[key]) for key in list(row)[:4] if row[key] is not None)}"
            status.update(said)
            if not console.is_terminal and time.monotonic() > last + LINES_S:
                last = time.monotonic()
                console.print(said, markup=False)

        yield tell


def terminal(me: World | None = None, stderr: bool = False) -> "Console":
    """Of ranks only the first one speaks; mpirun and srun may give it a terminal of its own, also where its words go to a file."""
    from rich.console import Console

    of_others = me is not None and me.launcher not in (None, "torchrun")
    return Console(
        stderr=stderr,
        soft_wrap=stderr,
        highlight=False,
        emoji=False,
        quiet=me is not None and me.rank > 0,
        force_terminal=False if of_others else None,
    )

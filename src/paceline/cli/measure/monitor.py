"""paceline monitor: sample this node, on its own or while a command of another program runs."""

import contextlib
import platform
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from paceline.monitor.sampler import Sampler, Writer
    from paceline.monitor.step_pattern import StepClock

FORMATS = ("paceline", "nvidia-smi")
MIN_S, MAX_S = 0.1, 3600.0


def monitor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Command to run, after -- [default: none; sample until Ctrl-C]", show_default=False
        ),
    ] = None,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between samples")] = 1.0,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the samples to this file [default: keep no samples]"),
    ] = None,
    format: Annotated[
        str,
        typer.Option(help="Format of the file: paceline, or nvidia-smi for the columns of its --query-gpu"),
    ] = "paceline",
    step_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Lines of the command's output that report a step; the first group is its number",
        ),
    ] = None,
    hang_after: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds without a step, or with all ranks idle, after which stacks are printed "
            "[default: 60, and 20 steps at least]",
        ),
    ] = None,
) -> None:
    """Sample the processors, memory, disks, network and GPUs of this node.

    With a command, sample while it runs, then print findings, and exit with its status. The ranks that it
    starts are recognized by the variables of torchrun, mpirun and srun. Without one, the status is 1 if
    samples were lost, for example on a full disk.
    """
    from paceline.cli.options.plan_options import check_positive
    from paceline.errors import SpecError
    from paceline.monitor.step_pattern import StepClock

    if not MIN_S <= every <= MAX_S:
        raise SpecError(f"--every must be from {MIN_S:g} to {MAX_S:g} seconds, got {every:g}")
    check_positive(**{"hang-after": hang_after})
    if format not in FORMATS:
        raise SpecError(f"--format must be paceline or nvidia-smi, got {format[:40]!r}")
    if not command and (step_pattern is not None or hang_after is not None):
        option = "--step-pattern" if step_pattern is not None else "--hang-after"
        raise SpecError(f"{option} requires a command; write it after --")
    steps = StepClock(_compile(step_pattern)) if step_pattern is not None else None
    with _choose_file(csv) as path:
        if command:
            status = _sample_command(command, path, every, format, steps, hang_after)
            _print_results(path, csv, sys.stderr)
            raise typer.Exit(status)
        is_complete = _sample_alone(path, every, format)
        _print_results(path, csv, sys.stdout)
        if not is_complete:
            raise typer.Exit(1)


def _compile(pattern: str) -> re.Pattern[str]:
    from paceline.errors import SpecError

    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SpecError(
            f"--step-pattern is not a regular expression: {error}, got {pattern[:60]!r}"
        ) from None


@contextlib.contextmanager
def _choose_file(csv: Path | None) -> Iterator[Path]:
    """Yield the path of the file of the samples, which is deleted if nobody asked for it."""
    if csv is not None:
        from paceline.errors import RunError
        from paceline.files import check_target

        check_target(csv, RunError)
        yield csv
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        yield Path(folder) / "samples.csv"


def _open_writer(path: Path, format: str, sampler: "Sampler") -> "Writer":
    """Return the writer of a format. Raises ClusterError if the machine has nothing to write in it."""
    from paceline.errors import ClusterError
    from paceline.monitor.gpus.nvidia_smi_writer import HEADER, NvidiaSmiWriter
    from paceline.monitor.sample_writer import SampleWriter, lock_to_append
    from paceline.monitor.sections import FIRST_LINE

    if format == "paceline":
        return SampleWriter(lock_to_append(path, FIRST_LINE), path)
    if "gpu" in sampler.absent:
        raise ClusterError(
            f"--format nvidia-smi requires a GPU: {sampler.absent['gpu']}; use --format paceline"
        )
    return NvidiaSmiWriter(lock_to_append(path, HEADER), path)


def _sample_command(
    command: Sequence[str],
    path: Path,
    every_s: float,
    format: str,
    steps: "StepClock | None",
    hang_after: float | None,
) -> int:
    """Run a command and sample until it ends. Return its exit status."""
    from paceline.launch.foreign_command import ForeignCommand
    from paceline.monitor.hang import HangDetector
    from paceline.monitor.processes import RankSensor
    from paceline.monitor.sampler import Sampler, sample
    from paceline.monitor.stacks import dump_stacks

    running: ForeignCommand | None = None
    ranks = RankSensor(lambda: running.find_ranks() if running is not None else {})
    sampler = Sampler(ranks, path.absolute().parent, [steps] if steps is not None else [])
    writer = _open_writer(path, format, sampler)
    detector = HangDetector(hang_after, steps)

    def observe(at: float, columns: Sequence[str], values: Sequence[float | None]) -> None:
        if (sentence := detector.check(columns, values)) is not None:
            for line in (f"paceline: {sentence}", *dump_stacks(ranks.pids)):
                print(line, file=sys.stderr, flush=True)

    running = ForeignCommand(command, steps.feed if steps is not None else None)
    with running.forwarding_signals():
        sample(sampler, writer, every_s, running.wait, observe)
        status = running.finish()
    _close(writer)
    return status


def _sample_alone(path: Path, every_s: float, format: str) -> bool:
    """Sample until a signal ends it. Return whether all samples were written."""
    from paceline.monitor.processes import RankSensor
    from paceline.monitor.sampler import Sampler, sample

    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: is_over.set())
    sampler = Sampler(RankSensor(dict, 0), path.absolute().parent)
    writer = _open_writer(path, format, sampler)
    print(f"sampling {platform.node()} every {every_s:g} s until Ctrl-C", flush=True)
    sample(sampler, writer, every_s, is_over.wait)
    return _close(writer)


def _close(writer: "Writer") -> bool:
    """Report lost samples. Return whether there are none."""
    from paceline.monitor.sample_writer import describe_lost_rows
    from paceline.units import several

    writer.close()
    if writer.lost:
        why = describe_lost_rows(writer.path)
        print(f"paceline: {several(writer.lost, 'sample')} lost: {why}", file=sys.stderr)
    return not writer.lost


def _print_results(path: Path, csv: Path | None, file: TextIO) -> None:
    """Print a table of the samples, and findings. An error here must not hide the status of a command."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from paceline.errors import Error
    from paceline.inspect.find import find
    from paceline.inspect.read_facts import read_recorded_facts
    from paceline.inspect.text import format_findings
    from paceline.monitor.overview import describe_extent, summarize_samples
    from paceline.monitor.samples import read_samples

    console = Console(file=file, highlight=False)
    try:
        samples = read_samples(path)
        found = find(read_recorded_facts(path))
    except Error as error:
        print(f"paceline: {error}", file=file)
        return
    name = samples.node or platform.node()
    kept = f", in {csv}" if csv is not None else "; --csv FILE keeps them"
    console.print(f"{name}: {describe_extent(samples)}{kept}", soft_wrap=True, markup=False)
    table = Table("", "mean", "least", "most", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in summarize_samples(samples):
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)
    # Rules that need a run cannot be checked here, and need no mention.
    of_samples = {what: why for what, why in found.missing.items() if "sample" in why}
    for line in format_findings(replace(found, missing=of_samples)):
        console.print(line, soft_wrap=True, markup=False)

"""Progress of a training: a bar on a terminal, lines elsewhere and in log.txt, scalars for TensorBoard."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import Error
from paceline.events import Ended, Evaluated, Event, Failed, NoiseMeasured, Noted, Stalled, Started, Step
from paceline.output import open_append
from paceline.report.hyperparameters import format_request, read_hyperparameters
from paceline.report.run_view import view
from paceline.report.summary import SummaryBuilder
from paceline.report.text import (
    build_closing_table,
    format_event,
    format_headline,
    format_metrics,
    format_start_times,
)
from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.report.mlflow_process import MlflowProcess
    from paceline.report.tensorboard.scalar_writer import ScalarWriter

Show = Callable[[Event], None]
LINES_S = 1.0  # minimum interval between lines of steps
SCALARS_S = 0.1  # minimum interval between points


def watch(
    events: Iterator[Event],
    run: RunFolder,
    console: Console | None = None,
    conclude: Callable[[RunFolder], Sequence[str]] = lambda run: (),
) -> Event | None:
    """Show events as they arrive; at the end a table and the lines of `conclude`. Return the last event.

    A training that fails or is killed has no table, but the lines of `conclude`, which writes its report."""
    console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    with contextlib.ExitStack() as at_end:
        return _watch(events, run, console, conclude, at_end)


def _watch(
    events: Iterator[Event],
    run: RunFolder,
    console: Console,
    conclude: Callable[[RunFolder], Sequence[str]],
    at_end: contextlib.ExitStack,
) -> Event | None:
    """Show events. at_end: is left after the lines of `conclude`, also if the training fails."""
    summary, last, is_resumed, has_started = SummaryBuilder(), None, False, False

    def show_conclusion() -> None:
        for line in conclude(run):
            console.print(line, style="yellow", markup=False)

    mlflow: MlflowProcess | None = None
    with contextlib.ExitStack() as stack:
        # After the bar has ended, also if a rank that shows its own progress raises an error.
        stack.callback(lambda: None if isinstance(last, Ended) or not has_started else show_conclusion())
        shows: list[Show] = []
        for event in events:
            if not shows:
                with contextlib.suppress(OSError):  # the disk is full; the run continues
                    shows = [show_lines(partial(_log, stack.enter_context(open_append(run.log))))]
                shows.append(
                    stack.enter_context(_show_bar(console))
                    if console.is_terminal
                    else show_lines(partial(_print, console))
                )
                if importlib.util.find_spec("tensorboard") is not None:
                    shows.append(stack.enter_context(_write_scalars(run)))
                mlflow = _start_mlflow(run, console, at_end)
            summary.add(event)
            is_resumed |= last is None and isinstance(event, Started) and event.step > 0
            has_started |= isinstance(event, Started)
            last = event
            notes = mlflow.new_notes() if mlflow is not None else []
            for shown in (event, *(Noted(step=getattr(event, "step", 0), message=note) for note in notes)):
                for show in shows:
                    show(shown)
    if isinstance(last, Ended):
        result = summary.build()
        # A full disk may have lost events of earlier starts: then the file has no end.
        if is_resumed and (whole := view(run).summary).ended is not None:
            result = whole
        console.print(build_closing_table(result))
        show_conclusion()
        stopped = last.reason == "stopped"
        console.print(
            f"[bold]run[/]  {run.path}"
            + (f"   stopped; continue with: paceline resume {run.path}" if stopped else "")
        )
    return last


def _start_mlflow(run: RunFolder, console: Console, at_end: contextlib.ExitStack) -> "MlflowProcess | None":
    """Start to send the run to MLflow if its request names an address."""
    try:
        if not run.spec.exists() or run.request()[1].mlflow is None:
            return None
    except Error:
        return None
    from paceline.report.mlflow_process import MlflowProcess

    process = MlflowProcess(run)

    def finish() -> None:
        for note in process.finish():
            console.print(f"note: {note}", style="yellow", markup=False)

    at_end.callback(finish)
    return process


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False)


def _log(file: TextIO, text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=file)


def show_lines(write: Callable[[str], Any]) -> Show:
    """Return a function that writes events as lines, at most one line of steps per second."""
    last, lr_group = float("-inf"), ""

    def show(event: Event) -> None:
        nonlocal last, lr_group
        if isinstance(event, Step):
            if event.time - last < LINES_S:
                return
            last = event.time
        if isinstance(event, Failed) and event.what == "run":
            return  # the launcher reports which rank was the cause
        if isinstance(event, Started):
            lr_group = event.lr_group
        write(format_event(event, lr_group))
        if isinstance(event, Started) and event.start_s:
            write(format_start_times(event))
        for note in event.notes if isinstance(event, Started) else ():
            write(f"note: {note}")

    return show


@contextlib.contextmanager
def _show_bar(console: Console) -> Iterator[Show]:
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} samples/s"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[metrics]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as progress:
        bar = progress.add_task("", start=False, visible=False, loss="", speed="", metrics="")
        last = 0.0

        def show(event: Event) -> None:
            nonlocal last
            match event:
                case Started():
                    for text in (format_headline(event), *(f"note: {note}" for note in event.notes)):
                        _print(console, text)
                    progress.reset(bar, total=event.steps, completed=event.step, visible=True)
                case Step():
                    if event.time - last < SCALARS_S and event.step != progress.tasks[0].total:
                        return
                    last = event.time
                    progress.update(
                        bar,
                        completed=event.step,
                        loss=f"{event.loss:.4f}",
                        speed=f"{event.samples_per_s:,.0f}",
                    )
                case Evaluated():
                    progress.update(
                        bar,
                        metrics=format_metrics(
                            {name: value for name, value in event.metrics.items() if name != "loss"}
                        ),
                    )
                case Noted():
                    _print(console, format_event(event))
                case Failed() if event.what != "run":
                    console.print(event.message, style="red", markup=False)
                case Stalled():
                    console.print(format_event(event), style="red", markup=False)

        yield show


def build_tag(name: str) -> str:
    """Return the tag of a metric of an evaluation. Those of steps begin with "train/"."""
    if name.startswith("train/"):
        return f"evaluated_{name}"
    return name if "/" in name else f"validation/{name}"


@contextlib.contextmanager
def _write_scalars(run: RunFolder) -> Iterator[Show]:
    """Write scalars, the request and notes for TensorBoard.

    At most ten points a second are written, so that short steps are not slowed down.
    """
    writer: ScalarWriter | None = None
    last, started_s = 0.0, 0.0

    def show(event: Event) -> None:
        nonlocal writer, last, started_s
        if isinstance(event, Started):
            started_s = event.time
        if not isinstance(event, (Step, Evaluated, NoiseMeasured, Noted)) or (
            isinstance(event, Step) and event.time - last < SCALARS_S
        ):
            return
        if writer is None:  # imported late: the first step does not wait for it
            from paceline.report.tensorboard.scalar_writer import ScalarWriter

            try:
                writer = ScalarWriter(run.tensorboard)
            except OSError:  # the disk is full, or the folder cannot be written
                return
            if run.spec.exists():
                writer.write_hyperparameters(read_hyperparameters(run), started_s)
                writer.write_text("request", format_request(run), 0, started_s)
        if isinstance(event, Noted):
            writer.write_text("notes", event.message, event.step, event.time)
            return
        values: dict[str, float | None]
        if isinstance(event, Evaluated):
            values = {build_tag(name): value for name, value in event.metrics.items()}
        elif isinstance(event, NoiseMeasured):
            values = {"train/noise_scale": event.noise_scale}
        else:
            last = event.time
            values = {
                f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm", "lr", "samples_per_s")
            } | {f"train/{name}": value for name, value in event.losses.items()}
        writer.write(values, event.step, event.time)

    try:
        yield show
    finally:
        if writer is not None:
            writer.close()

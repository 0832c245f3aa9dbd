"""Show a training while it runs: a progress bar on a terminal, plain lines elsewhere and in log.txt, scalars for TensorBoard."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.events import Ended, Evaluated, Event, Failed, Stalled, Started, Step
from paceline.output import open_append
from paceline.report.run_view import view
from paceline.report.summary import SummaryBuilder
from paceline.report.text import closing, headline, line, metrics, phases
from paceline.run import RunFolder

Show = Callable[[Event], None]
LINES_S = 1.0  # at most one line of a step in so many seconds
SCALARS_S = 0.1


def watch(events: Iterator[Event], run: RunFolder, console: Console | None = None) -> Event | None:
    """Show events as they come, and a table once they end. Returns the last one."""
    console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    summary, last, is_resumed = SummaryBuilder(), None, False
    with contextlib.ExitStack() as open_now:
        shows: list[Show] = []
        for event in events:
            if not shows:
                with contextlib.suppress(OSError):  # a disk that takes no more files: the run goes on
                    shows = [_lines(partial(_log, open_now.enter_context(open_append(run.log))))]
                shows.append(
                    open_now.enter_context(_bar(console))
                    if console.is_terminal
                    else _lines(partial(_print, console))
                )
                if importlib.util.find_spec("tensorboard") is not None:
                    shows.append(open_now.enter_context(_scalars(run.tensorboard)))
            summary.add(event)
            is_resumed |= last is None and isinstance(event, Started) and event.step > 0
            last = event
            for show in shows:
                show(event)
    if isinstance(last, Ended):
        found = summary.summary()
        if is_resumed and (whole := view(run).summary).ended is not None:  # a full disk may have cost events
            found = whole
        console.print(closing(found))
        stopped = last.reason == "stopped"
        console.print(
            f"[bold]run[/]  {run.path}"
            + (f"   stopped; continue with: paceline resume {run.path}" if stopped else "")
        )
    return last


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False)


def _log(file: TextIO, text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=file)


def _lines(write: Callable[[str], Any]) -> Show:
    last, lr_group = float("-inf"), ""

    def show(event: Event) -> None:
        nonlocal last, lr_group
        if isinstance(event, Step):
            if event.time - last < LINES_S:
                return
            last = event.time
        if isinstance(event, Failed) and event.what == "run":
            return  # whoever started the ranks says which of them was the cause
        if isinstance(event, Started):
            lr_group = event.lr_group
        write(line(event, lr_group))
        if isinstance(event, Started) and event.start_s:
            write(phases(event))
        for note in event.notes if isinstance(event, Started) else ():
            write(f"note: {note}")

    return show


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Show]:
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
                    for text in (headline(event), *(f"note: {note}" for note in event.notes)):
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
                        metrics=metrics(
                            {name: value for name, value in event.metrics.items() if name != "loss"}
                        ),
                    )
                case Failed() if event.what != "run":
                    console.print(event.message, style="red", markup=False)
                case Stalled():
                    console.print(line(event), style="red", markup=False)

        yield show


@contextlib.contextmanager
def _scalars(folder: Path) -> Iterator[Show]:
    """At most ten points a second, so that a training of short steps is not held up."""
    writer: Any = None
    last = 0.0

    def show(event: Event) -> None:
        nonlocal writer, last
        if not isinstance(event, (Step, Evaluated)) or (
            isinstance(event, Step) and event.time - last < SCALARS_S
        ):
            return
        if writer is None:  # imported late: the first step does not wait for it
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
        if isinstance(event, Evaluated):
            values: dict[str, float | None] = {
                f"validation/{name}": value for name, value in event.metrics.items()
            }
        else:
            last = event.time
            values = {
                f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm", "lr", "samples_per_s")
            }
        with contextlib.suppress(OSError):
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(name, value, event.step, walltime=event.time)

    try:
        yield show
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

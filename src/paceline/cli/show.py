"""paceline show: what happened in a run, from its files."""

from pathlib import Path
from typing import Annotated

import typer


def show(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Show what happened in a run."""
    from rich.console import Console

    from paceline.events import read
    from paceline.report.summary import summarize
    from paceline.report.text import closing, headline, line
    from paceline.run import open_run

    folder = open_run(run)
    console = Console(highlight=False)
    summary = summarize(read(folder.events)) if folder.events.exists() else summarize([])
    if summary.started is None:
        console.print(f"{run}: nothing has happened yet")
        return
    console.print(headline(summary.started))
    go_on = f"go on with: paceline resume {run}"
    if summary.ended is not None:
        state = f"{summary.ended.reason} at step {summary.ended.step}" + (f"; {go_on}" if summary.ended.reason == "stopped" else "")
    elif folder.is_locked():
        state = f"running, step {summary.steps} of {summary.started.steps}"
    else:
        state = f"interrupted after step {summary.steps} of {summary.started.steps}; {go_on}"
    again = f", started {summary.starts} times" if summary.starts > 1 else ""
    console.print(f"{state}{again}")
    console.print(closing(summary))
    for failure in summary.failures:
        if failure.what == "run" and not failure.lost_peer:
            console.print(line(failure), style="red", markup=False)
    kept = folder.checkpoints()
    console.print(f"checkpoints kept: {', '.join(f'step {step}' for step in kept)}" if kept else "no checkpoint")

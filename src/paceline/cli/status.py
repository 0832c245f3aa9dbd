"""paceline status: how runs are, here and in Slurm."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.run import RunFolder


def status(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs. Default: all in runs/.")] = None,
) -> None:
    """Say how runs are: a line for each."""
    from paceline.errors import RunError
    from paceline.run import open_run

    found = runs or sorted(path.parent for path in Path("runs").glob("*/spec.toml"))
    if not found:
        raise RunError("there is no run in runs/; say which folder")
    for run in [open_run(path) for path in found]:
        print(f"{run.path}: {_line(run)}")


def _line(run: RunFolder) -> str:
    from paceline.events import latest
    from paceline.launch import slurm
    from paceline.report.state import of_job, of_run
    from paceline.report.summary import summarize

    summary = summarize(latest(run.events))
    job = slurm.status(run.job) if run.job is not None else None
    loss = f", loss {summary.last_loss:.4f}" if summary.last_loss is not None else ""
    if job is None:
        return of_run(run, summary) + loss
    if job.is_active and summary.started is not None:
        return f"{of_job(job)}; step {summary.steps} of {summary.started.steps}{loss}"
    return f"{of_job(job)}; {of_run(run, summary)}{loss}"

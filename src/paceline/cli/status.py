"""paceline status: how runs are, here and in Slurm."""

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.errors import Error
    from paceline.launch.slurm.client import Status


def status(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs. Default: all in runs/.")] = None,
) -> None:
    """Say how runs are: a line for each, with the last loss, the metric by which a checkpoint is best, and the speed."""
    from paceline.errors import Error, RunError
    from paceline.run import open_run

    found = runs or sorted(path.parent for path in Path("runs").glob("*/spec.toml"))
    if not found:
        raise RunError("there is no run in runs/; say which folder")
    failed: list[str] = []
    for path in found:
        try:
            print(f"{path}: {_line(open_run(path))}")
        except Error as error:  # the runs after it are shown all the same
            failed.append(str(error))
    if failed:
        raise RunError("\n".join(failed))


def _line(run: RunFolder) -> str:
    from paceline.cli.run_state import figures, of_job, of_run
    from paceline.errors import Error
    from paceline.report.run_view import glance

    found = glance(run)
    summary = found.summary
    skipped = f"; {found.skipped}" if found.skipped else ""
    job = None
    try:
        if run.job is not None:
            jobs, cannot = _jobs()
            job = jobs.get(run.job)
            skipped += f"; {cannot}" if cannot is not None else ""
    except Error as error:  # its file is damaged: what the run's own files say is shown all the same
        skipped += f"; {error}"
    best = ""
    if summary.metrics:
        with contextlib.suppress(Error):  # its request is damaged: the first metric is shown
            best = run.request()[0].save.best.split()[1]
    so_far = figures(summary, best)
    if job is None:
        return of_run(run, summary) + so_far + skipped
    if job.is_active and summary.started is not None:
        return f"{of_job(job)}; step {summary.steps} of {summary.started.steps}{so_far}{skipped}"
    return f"{of_job(job)}; {of_run(run, summary)}{so_far}{skipped}"


@functools.cache
def _jobs() -> "tuple[dict[str, Status], Error | None]":
    """All jobs of Slurm, which is asked once for all runs, or why it cannot be."""
    from paceline.errors import LaunchError
    from paceline.launch.slurm import client as slurm

    try:
        return slurm.statuses(), None
    except LaunchError as error:
        return {}, error

"""paceline status: show the state of runs, here and in Slurm."""

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
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs [default: all in runs/]")] = None,
) -> None:
    """Show the state of runs: a line each, with loss, validation metric and throughput."""
    from paceline.errors import Error, RunError
    from paceline.run import open_run

    folders = runs or sorted(path.parent for path in Path("runs").glob("*/spec.toml"))
    if not folders:
        raise RunError("no runs in runs/; specify the folder of a run")
    errors: list[str] = []
    for path in folders:
        try:
            print(f"{path}: {_describe(open_run(path))}")
        except Error as error:  # the other runs are still shown
            errors.append(str(error))
    if errors:
        raise RunError("\n".join(errors))


def _describe(run: RunFolder) -> str:
    from paceline.errors import Error
    from paceline.report.run_state import describe_progress, describe_run
    from paceline.report.run_view import glance

    seen = glance(run)
    summary = seen.summary
    notes = f"; {seen.skipped}" if seen.skipped else ""
    job = None
    try:
        if run.job is not None:
            jobs, error = _list_jobs(run.path.stat().st_uid)
            job = jobs.get(run.job)
            notes += f"; {error}" if error is not None else ""
    except Error as damage:  # of the file with the job number; the files of the run are still shown
        notes += f"; {damage}"
    best = ""
    if summary.metrics:
        with contextlib.suppress(Error):  # a damaged request: show the first metric
            best = run.request()[0].save.best.split()[1]
    progress = describe_progress(summary, best)
    if job is None:
        return describe_run(run, summary) + progress + notes
    if job.is_active and summary.started is not None:
        return f"{_describe_job(job)}; step {summary.steps} of {summary.started.steps}{progress}{notes}"
    return f"{_describe_job(job)}; {describe_run(run, summary)}{progress}{notes}"


@functools.cache
def _list_jobs(user: int) -> "tuple[dict[str, Status], Error | None]":
    """Return the jobs of a user by number, or the error of the query. Slurm is queried once for all runs."""
    from paceline.errors import LaunchError
    from paceline.launch.slurm import client as slurm

    try:
        return slurm.list_statuses(user), None
    except LaunchError as error:
        return {}, error


def _describe_job(job: "Status") -> str:
    """Return the state of a job in Slurm's words."""
    text = f"job {job.id} {job.state}"
    if job.state == "PENDING":
        return (
            text
            + (f" ({job.reason})" if job.reason else "")
            + (f", expected to begin at {job.start}" if job.start else "")
        )
    if job.is_active:
        return f"{text} on {job.nodes}, {job.run_time} of {job.time_limit}"
    return text + (f" ({job.reason})" if job.reason else "")

"""paceline cancel: end a training, which saves and can go on later."""

import os
import platform
import re
import signal
from pathlib import Path
from typing import Annotated

import typer


def cancel(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """End a training, in Slurm or on this machine. All ranks save and stop; a job that waits is taken from the queue."""
    from paceline.cli.run_state import of_run
    from paceline.errors import RunError
    from paceline.launch.slurm import client as slurm
    from paceline.report.run_view import glance
    from paceline.run import open_run

    folder = open_run(run)
    job = slurm.status(folder.job) if folder.job is not None else None
    if job is not None and job.is_active:
        slurm.cancel(job.id)
        print(f"{run}: job {job.id} is cancelled; go on with: sbatch {folder.job_script}")
        return
    if not folder.is_locked():
        seen = glance(folder)
        skipped = f"; {seen.skipped}" if seen.skipped else ""
        raise RunError(f"{run} is not running: {of_run(folder, seen.summary)}{skipped}")
    holder = folder.holder()
    found = re.fullmatch(r"process ([0-9]{1,9}) on (.+)", holder)
    if found is None or found[2] != platform.node():
        raise RunError(f"{run} is being trained by {holder}; end it there")
    if not folder.is_held_by(
        int(found[1])
    ):  # it may be the run of somebody else, who wrote there what he liked
        raise RunError(
            f"{run} says that it is being trained by {holder}, which does not hold it; end the right one by kill"
        )
    os.kill(int(found[1]), signal.SIGTERM)
    print(f"{run}: {holder} was told to save and stop; go on with: paceline resume {run}")

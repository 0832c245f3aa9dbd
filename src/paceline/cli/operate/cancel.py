"""paceline cancel: stop a run, which saves a checkpoint first."""

import os
import platform
import re
import signal
from pathlib import Path
from typing import Annotated

import typer


def cancel(run: Annotated[Path, typer.Argument(help="Folder of the run")]) -> None:
    """Stop a run, in Slurm or on this machine.

    All ranks save and stop; a pending job is removed from the queue.
    """
    from paceline.errors import RunError
    from paceline.launch.slurm import client as slurm
    from paceline.report.run_state import describe_run
    from paceline.report.run_view import glance
    from paceline.run import open_run

    folder = open_run(run)
    job = slurm.status(folder.job) if folder.job is not None else None
    if job is not None and job.is_active:
        slurm.cancel(job.id)
        print(f"{run}: job {job.id} is cancelled; continue with: sbatch {folder.job_script}")
        return
    if not folder.is_locked():
        seen = glance(folder)
        skipped = f"; {seen.skipped}" if seen.skipped else ""
        raise RunError(f"{run} is not running: {describe_run(folder, seen.summary)}{skipped}")
    holder = folder.holder()
    match = re.fullmatch(r"process ([0-9]{1,9}) on (.+)", holder)
    if match is None or match[2] != platform.node():
        raise RunError(f"{run} is being trained by {holder}; stop it there")
    if not folder.is_held_by(int(match[1])):  # another user's run may name any process
        raise RunError(
            f"{run} names {holder}, which does not hold the lock of the run; stop the process that trains "
            "it with kill"
        )
    os.kill(int(match[1]), signal.SIGTERM)
    print(f"{run}: asked {holder} to save and stop; continue with: paceline resume {run}")

"""paceline logs: what a training said."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.run import RunFolder


def logs(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    rank: Annotated[
        int | None, typer.Option(help="What this rank wrote, in place of what the training said.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows, until Ctrl-C.")] = False,
) -> None:
    """Print what a training said: in Slurm the output of its last job."""
    from paceline.run import open_run

    folder = open_run(run)
    file = _of_rank(folder, rank) if rank is not None else _of_run(folder)
    os.execvp("tail", ["tail", "-n", "+1", *(["-F"] if follow else []), str(file)])


def _of_run(run: RunFolder) -> Path:
    from paceline.errors import RunError

    file = run.job_log() if run.job is not None else run.log
    if file is not None and file.exists():
        return file
    raise RunError(
        f"{run.path} has said nothing yet"
        + (f": job {run.job} has not begun (paceline status {run.path})" if run.job else "")
    )


def _of_rank(run: RunFolder, rank: int) -> Path:
    from paceline.errors import RunError

    logs = list(run.ranks.glob("*.log")) if run.ranks.is_dir() else []
    found = [path for path in logs if path.name.partition(".")[0] == str(rank)]
    if not found:
        there = ", ".join(sorted({path.name.partition(".")[0] for path in logs}, key=int)) or "none"
        raise RunError(f"{run.path} has no log of rank {rank}; there is {there}")
    return max(found, key=lambda path: path.stat().st_mtime)

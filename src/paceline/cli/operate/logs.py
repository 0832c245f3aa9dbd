"""paceline logs: print the output of a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.run import RunFolder


def logs(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    rank: Annotated[
        int | None, typer.Option(help="Print the log of this rank, instead of the output of the run.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing as the output grows, until Ctrl-C.")
    ] = False,
) -> None:
    """Print the output of a run. In Slurm this is the output of its last job."""
    from paceline.run import open_run

    folder = open_run(run)
    file = _rank_log(folder, rank) if rank is not None else _run_log(folder)
    os.execvp("tail", ["tail", "-n", "+1", *(["-F"] if follow else []), str(file)])


def _run_log(run: RunFolder) -> Path:
    from paceline.errors import RunError

    file = run.job_log() if run.job is not None else run.log
    if file is not None and file.exists():
        return file
    raise RunError(
        f"{run.path} has no output yet"
        + (f": job {run.job} has not started; see paceline status {run.path}" if run.job else "")
    )


def _rank_log(run: RunFolder, rank: int) -> Path:
    from paceline.errors import RunError

    logs = list(run.ranks.glob("*.log")) if run.ranks.is_dir() else []
    matches = [path for path in logs if path.name.partition(".")[0] == str(rank)]
    if not matches:
        ranks = ", ".join(sorted({path.name.partition(".")[0] for path in logs}, key=int)) or "none"
        raise RunError(f"{run.path} has no log of rank {rank}; ranks with a log: {ranks}")
    return max(matches, key=lambda path: path.stat().st_mtime)

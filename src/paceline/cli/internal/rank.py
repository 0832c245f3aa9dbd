"""paceline rank: one rank of a launcher of Paceline. Internal."""

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from paceline.distributed.world import World
from paceline.errors import Error
from paceline.run import RunFolder, open_run
from paceline.spec import HF_TASK


def rank(
    run: Path,
    launcher: Annotated[int | None, typer.Argument()] = None,
    server: Annotated[int | None, typer.Argument()] = None,
    task_file: Annotated[Path | None, typer.Option()] = None,
    model_folder: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Train as one rank of a run. The environment gives the number of the rank.

    launcher: the process id of the launcher on this machine, which reports the end of the rank. None: srun
        started this process, and the ranks report their errors themselves.
    server: the descriptor of a socket. This process is then a fork server, and the launcher requests ranks
        over the socket.
    task_file: a task that another process sent (see `launch.sent_task`).
    model_folder: of a Hugging Face model; for a fork server that starts before the run has its request.
    """
    importer = None
    if server is not None:
        import paceline.launch.rank_main  # noqa: F401 (what every rank needs)
        from paceline.launch.fork_ranks import serve

        _import_model_library(run, model_folder)
        forked = serve(server)
        if forked is None:
            return
        importer, _ = forked
    from paceline.distributed.world import read_world

    folder, me = open_run(run), read_world()
    if launcher is None:
        _train_reporting_once(folder, me)
        return
    from paceline.launch.rank_main import run_started

    run_started(folder, me, launcher, importer, task_file)


def _import_model_library(run: Path, model_folder: str | None) -> None:
    """Import the library of the model, if Paceline's own task names it: once for all ranks."""
    with contextlib.suppress(Error):  # the ranks report what is wrong
        if model_folder is None:
            spec, _ = open_run(run).next_request()
            model_folder = spec.set.get("folder") if spec.task == HF_TASK else None
        if model_folder is not None:
            from paceline.hf.task import import_model_library

            import_model_library(model_folder)


def _train_reporting_once(folder: RunFolder, me: World) -> None:
    """Train.

    If several ranks fail, the first reports its error, and the others write theirs to their logs.
    """
    from paceline.cli.train.resume import resume_run

    try:
        resume_run(folder, {}, me, is_restart=True)
    except typer.Exit:
        raise
    except Exception:  # the top of a rank
        if not claim_first_failure(folder, me):
            with open(folder.rank_log(me.rank), "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            sys.exit(2)
        raise


def claim_first_failure(folder: RunFolder, me: World) -> bool:
    """Return whether this process is the first of its job to fail. A file of the run folder decides."""
    folder.ranks.mkdir(exist_ok=True)
    try:
        os.close(os.open(folder.ranks / f"failed-{me.job}", os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True

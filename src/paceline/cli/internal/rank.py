"""paceline rank: one rank of a launcher of ours. Not for people."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from paceline.distributed.world import World
from paceline.run import RunFolder


def rank(
    run: Path,
    launcher: Annotated[int | None, typer.Argument()] = None,
    server: Annotated[int | None, typer.Argument()] = None,
) -> None:
    """Train the request of a run, or go on with it, as the rank that the environment says.

    `launcher`: the process on this machine that started it and says what became of it. None: srun did, and ranks speak for themselves.
    `server`: the descriptor of a socket at which the launcher asks this process, a fork server, for ranks.
    """
    importer = None
    if server is not None:
        from paceline.launch.fork_ranks import serve

        importer = serve(server)
        if importer is None:
            return
    from paceline.distributed.world import read_world
    from paceline.run import open_run

    folder, me = open_run(run), read_world()
    if launcher is None:
        _speak_once(folder, me)
        return
    from paceline.launch.rank_main import run_started

    run_started(folder, me, launcher, importer)


def _speak_once(folder: RunFolder, me: World) -> None:
    """Of ranks that fail together the first one says why; what the others have to say is in their logs."""
    from paceline.cli.resume import resume_run

    try:
        resume_run(folder, {}, me, again=True)
    except typer.Exit:
        raise
    except Exception:  # the top of a rank
        if not is_first(folder, me):
            with open(folder.rank_log(me.rank), "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            sys.exit(2)
        raise


def is_first(folder: RunFolder, me: World) -> bool:
    folder.ranks.mkdir(exist_ok=True)
    try:
        os.close(os.open(folder.ranks / f"failed-{me.job}", os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True

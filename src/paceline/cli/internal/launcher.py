"""paceline launcher: start and supervise the ranks of a run for `paceline.train`. Internal."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import Error
from paceline.files import write_secret
from paceline.launch.train_run import ERROR_FILE, TASK_FILE
from paceline.run import open_run


def launcher(run: Path, caller: Annotated[int, typer.Argument()], private: Path) -> None:
    """Start and supervise the ranks of a run for a Python process.

    run: the folder with the request.
    caller: the id of that process. If it ends, the ranks save and end.
    private: a folder that only this user can open. It has the task if that is sent, and gets the error that
        ends the training. This process deletes it if the caller is gone.
    """
    threading.Thread(target=_stop_without, args=(caller,), daemon=True).start()
    folder = open_run(run)
    task_file = private / TASK_FILE
    try:
        from paceline.launch import local

        launch = folder.next_request()[1]
        status = local.start(
            folder, launch.ranks or 1, launch.restarts, task_file if task_file.exists() else None
        )
    except Error as error:
        write_secret(private / ERROR_FILE, json.dumps([type(error).__name__, str(error)]))
        status = 2
    finally:
        if os.getppid() != caller:
            shutil.rmtree(private, ignore_errors=True)
    raise typer.Exit(status)


def _stop_without(caller: int) -> None:
    """Stop the training when the process that wants it is gone."""
    while os.getppid() == caller:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)

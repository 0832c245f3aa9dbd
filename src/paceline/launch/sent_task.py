"""A task as an object, sent from the process of the user to the ranks that it starts.

cloudpickle contains the class itself if other processes cannot import it: a class of a script or a notebook.
The file is in a folder that only this user can open, and it is deleted with the training.
"""

import pickle
from pathlib import Path

from paceline import task as tasks
from paceline.errors import TaskError
from paceline.files import read_own_bytes, write_secret
from paceline.task import Task
from paceline.user_code import describe_exception


def send_task(task: Task, reference: str, file: Path) -> None:
    """Write a task, for `receive_task`. Raises TaskError if a part of it cannot be pickled."""
    write_secret(file, pack_task(task, reference))


def pack_task(task: Task, reference: str) -> bytes:
    """Return a task as a pickle, for `unpack_task`. Raises TaskError if a part of it cannot be pickled."""
    from paceline.launch.by_value import dumps

    try:
        content = dumps((reference, task))
    except Exception as error:  # of the user's objects
        raise TaskError(
            f"task {type(task).__name__} cannot be sent to the ranks: {type(error).__name__}: {error}; open "
            "files, locks and connections in dataset() or model(), where each rank opens its own"
        ) from error
    return content


def receive_task(file: Path) -> None:
    """Read a task of `send_task`. `load_task` returns it from then on. Raises TaskError.

    Raises RunError if the file belongs to another user.
    """
    unpack_task(read_own_bytes(file))


def unpack_task(content: bytes) -> None:
    """Read a task of `pack_task`, from a process of the same user, as `receive_task` does."""
    try:
        reference, task = pickle.loads(content)
    except Exception as error:  # an import fails on this rank
        raise TaskError(f"the task cannot be read: {describe_exception(error)}") from error
    tasks.keep_received(reference, task)

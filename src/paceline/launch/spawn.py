"""A rank as a process of this machine: its environment, its command and its log."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.run import RunFolder

# The status that the launcher gives a rank that exited with 0 before the training was over: EX_SOFTWARE of
# sysexits.h
UNFINISHED = 70


def describe_exit(status: int) -> str:
    """Return how a rank ended that reported no error, as the end of a sentence about it."""
    if status == UNFINISHED:
        return "failed: ended with exit status 0 before the training was over, as after sys.exit or os._exit"
    return (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"failed: ended with exit status {status}"
    )


def build_rank_environments(
    nodes: Sequence[str], host: str, port: int, job: str, attempt: int
) -> list[dict[str, str]]:
    """Return the variables that torchrun's agent would set for each rank.

    nodes: the node of each rank.
    host, port: the address of the store, which the launcher serves.
    attempt: the number of restarts before this start.
    """
    environments = []
    for rank, node in enumerate(nodes):
        environ = {
            "RANK": rank,
            "LOCAL_RANK": nodes[:rank].count(node),
            "WORLD_SIZE": len(nodes),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        environments.append({name: str(value) for name, value in environ.items()})
    return environments


def build_shared_environment(ranks: int) -> dict[str, str]:
    """Return the variables that all ranks have.

    Like torchrun's agent, it leaves a single rank all threads.
    """
    return ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}) | os.environ


def build_rank_arguments(
    run: Path, task_file: Path | None = None, model_folder: str | None = None
) -> list[str]:
    """Return the arguments with which Python becomes a rank whose launcher is this process.

    task_file: a task that another process sent (see `launch.sent_task`).
    model_folder: of a Hugging Face model, if the fork server starts before the run has its request.
    """
    sent = ["--task-file", str(task_file)] if task_file is not None else []
    model = ["--model-folder", model_folder] if model_folder is not None else []
    return ["-m", "paceline", "rank", *sent, str(run), str(os.getpid()), *model]


class Child(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class RankProcess:
    """A child of this process that is a rank.

    Its status is UNFINISHED if it exits with 0 before the training is over.
    """

    process: Child
    unfinished: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self._status(self.process.poll())

    def wait(self) -> int:
        status = self._status(self.process.wait())
        assert status is not None
        return status

    def send_signal(self, sig: int, /) -> None:
        self.process.send_signal(sig)

    def _status(self, status: int | None) -> int | None:
        return UNFINISHED if status == 0 and self.unfinished.exists() else status


def mark_unfinished(run: RunFolder, rank: int) -> Path:
    """Create and return the file that a rank deletes when it has finished. Call it before the rank starts."""
    unfinished = run.unfinished(rank)
    with contextlib.suppress(OSError):  # the disk is full: an exit status of 0 then counts as finished
        unfinished.touch()
    return unfinished


def spawn(
    run: Path,
    environ: Mapping[str, str],
    log: Path,
    task_file: Path | None = None,
    prefix: Sequence[str] = (),
) -> RankProcess:
    """Start a rank. It saves and ends when this process is gone.

    prefix: the words of a program that starts the rank.
    """
    unfinished = mark_unfinished(RunFolder(run), int(environ["RANK"]))
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*prefix, sys.executable, *build_rank_arguments(run, task_file)],
            env=build_shared_environment(int(environ["WORLD_SIZE"])) | dict(environ),
            stderr=file,
            start_new_session=True,
        )
    return RankProcess(process, unfinished)

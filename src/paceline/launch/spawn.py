"""One rank of ours as a process: what it is told of itself, its command, its log."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.run import RunFolder

UNFINISHED = 70  # exit status that a rank has for its launcher where it exited with 0 before the training was over; EX_SOFTWARE of sysexits.h


def environments(nodes: Sequence[str], host: str, port: int, job: str, attempt: int) -> list[dict[str, str]]:
    """For each rank what torchrun's agent would say to it. `nodes`: that of each rank; host, port: of the store that the launcher keeps."""
    told = []
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
        told.append({name: str(value) for name, value in environ.items()})
    return told


def environment(ranks: int) -> dict[str, str]:
    """What all of so many ranks share. torchrun's agent leaves a rank by itself all threads, too."""
    return ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}) | os.environ


def rank_words(run: Path) -> list[str]:
    """What Python is called with to become a rank of this process."""
    return ["-m", "paceline", "rank", str(run), str(os.getpid())]


class Child(Protocol):
    """What is used of a `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class RankProcess:
    """A child of this process that is a rank. One that exits with 0 before the training is over has the status UNFINISHED."""

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


def begin(run: RunFolder, rank: int) -> Path:
    """Call before a rank is started; returns the file that it deletes when it has finished."""
    unfinished = run.unfinished(rank)
    with contextlib.suppress(OSError):  # of a disk that takes no more files: an exit status of 0 is believed
        unfinished.touch()
    return unfinished


def spawn(run: Path, environ: Mapping[str, str], log: Path) -> RankProcess:
    """A rank, which saves and ends when this process is gone."""
    unfinished = begin(RunFolder(run), int(environ["RANK"]))
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *rank_words(run)],
            env=environment(int(environ["WORLD_SIZE"])) | dict(environ),
            stderr=file,
            start_new_session=True,
        )
    return RankProcess(process, unfinished)

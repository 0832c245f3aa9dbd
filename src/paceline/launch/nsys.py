"""Ranks under Nsight Systems: one report for each rank, in RUN/nsys/start_N.

The program `nsys profile` starts the rank as its child, ends with it, and returns its exit status. Signals go
to the rank, so that it can save, and nsys writes its report when the rank has ended.
"""

import contextlib
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from paceline.errors import LaunchError
from paceline.files import reason
from paceline.launch.spawn import Child, RankProcess, build_rank_arguments, spawn
from paceline.run import RunFolder

PROGRAM = "nsys"
OPTIONS = ("--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
SITE = "https://developer.nvidia.com/nsight-systems"


def check_program() -> None:
    """Raise LaunchError if nsys is not installed."""
    if shutil.which(PROGRAM) is None:
        raise LaunchError(
            f"--nsys requires Nsight Systems, and there is no program {PROGRAM} on the path; install it from"
            f" {SITE}, or leave --nsys out"
        )


def make_report_folder(run: RunFolder) -> Path:
    """Create and return the folder for the reports of the next start. Raises LaunchError."""
    number = 0
    while True:
        folder = run.path / "nsys" / f"start_{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise LaunchError(f"cannot create {folder} for the reports of nsys: {reason(error)}") from error


class NsysSlot:
    """A slot on this machine, in which a rank is spawned under nsys.

    folder: of the reports."""

    node = "localhost"

    def __init__(self, folder: Path, task_file: Path | None):
        self._folder, self._task_file = folder, task_file

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> RankProcess:
        report = self._folder / f"rank_{environ['RANK']}"
        prefix = [PROGRAM, "profile", *OPTIONS, f"--output={report}"]
        rank = spawn(run, environ, log, self._task_file, prefix)
        arguments = build_rank_arguments(run, self._task_file)
        return RankProcess(ProfiledProcess(rank.process, arguments), rank.unfinished)


class ProfiledProcess:
    """A process of nsys, with the rank that it starts. `arguments` are those of the rank."""

    def __init__(self, process: Child, arguments: Sequence[str]):
        self._process, self._arguments = process, [*arguments]

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int | None:
        return self._process.wait()

    def send_signal(self, number: int, /) -> None:
        """Kill all processes, or send another signal to the rank only."""
        if self.poll() is not None:
            return
        processes = self._list_processes()
        if number != signal.SIGKILL:
            ranks = [process for process in processes if self._is_rank(process)]
            processes = ranks or processes[:1]  # nsys itself, before the rank has started
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _list_processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            nsys = psutil.Process(self.pid)
            return [nsys, *nsys.children(recursive=True)]
        return []

    def _is_rank(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_python = len(words) == len(self._arguments) + 1  # nsys has the same arguments after its own
            return is_python and words[1:] == self._arguments
        return False

"""Commands run as a user runs them: real processes with exit status, output and files of the run."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

import warm
from paceline import events
from paceline.events import Event, Step
from paceline.run import RunFolder
from warm import MARK

E = TypeVar("E", bound=Event)
TIMEOUT_S = 240.0
PACELINE = (sys.executable, "-m", "paceline")
# The same on two ranks that another launcher starts.
TORCHRUN = (*PACELINE[:2], "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PACELINE[1:])
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", *PACELINE)
LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMI",
    "SLURM_",
    "TORCHELASTIC_",
    "MPI_",
    "HYDRA_",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
)

# A task with state that a resume could lose: random augmentation, dropout, statistics of BatchNorm.
# The file $SLOW has the seconds that a sample takes, so that a test can disturb a running training.
TASK = """
import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn

from paceline import Task


class Points:
    def __init__(self, count):
        draw = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 6, generator=draw), torch.randn(count, 3, generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with contextlib.suppress(OSError):
            time.sleep(float(Path(os.environ.get("SLOW", "")).read_text()))
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


class Regression(Task):
    width: int = 10
    depth: int = 3
    dropout: float = 0.2
    norm: bool = True
    samples: int = 53
    validation: int = 0

    def model(self):
        def block():
            norm = [nn.BatchNorm1d(self.width)] if self.norm else []
            linear = nn.Linear(self.width, self.width, bias=not norm)
            return nn.Sequential(linear, *norm, nn.Tanh(), nn.Dropout(self.dropout))

        blocks = [block() for _ in range(self.depth)]
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), *blocks, nn.Linear(self.width, 3))

    def dataset(self, split):
        count = self.samples if split == "train" else self.validation
        return Points(count) if count else None

    def loss(self, output, batch):
        return (output - batch[1]).square()
"""


def set_sample_delay(file: Path, sample_s: float) -> Path:
    """Set the time that each sample takes. Return `file`, for the variable SLOW of a training."""
    new_file = file.with_suffix(".new")
    new_file.write_text(str(sample_s))
    return new_file.replace(file)


def write_task(folder: Path, source: str = TASK, name: str = "my.py") -> Path:
    path = folder / name
    path.write_text(source)
    return path


@dataclass(frozen=True)
class Result:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return f"exit status {self.status}\n--- stdout ---\n{self.out}\n--- stderr ---\n{self.err}"


@dataclass
class Running:
    """A running command. As a context, it kills the command and all processes that it started."""

    process: subprocess.Popen[bytes] | warm.Process
    mark: str
    _out: tempfile._TemporaryFileWrapper = field(repr=False)
    _err: tempfile._TemporaryFileWrapper = field(repr=False)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.remaining_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Result:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.process.args} did not end in {timeout_s:.0f} s\n{self.output_so_far().all}"
            ) from None
        return self.output_so_far()

    def output_so_far(self) -> Result:
        """Return the output until now. The status of a running command is -1."""
        out, err = (Path(file.name).read_text(errors="replace") for file in (self._out, self._err))
        return Result(self.process.returncode if self.process.returncode is not None else -1, out, err)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until `holds()` is true. Fail if the command ends before. `what` names the condition."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            has_ended = self.process.poll() is not None
            if has_ended and holds():
                return
            assert not has_ended, f"{self.process.args} ended before {what}\n{self.output_so_far().all}"
            assert time.monotonic() < deadline, f"not {what} in {timeout_s:.0f} s\n{self.output_so_far().all}"
            time.sleep(0.02)

    def wait_for_step(self, run: Path, step: int) -> None:
        self.wait_until(lambda: last_step(run) >= step, f"at step {step}")

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks that the launcher of Paceline started, by number."""
        children = psutil.Process(self.process.pid).children()
        environments = [(child.environ(), child) for child in children]
        # A child without RANK has not executed its program yet.
        return {int(environ["RANK"]): child for environ, child in environments if "RANK" in environ}

    def remaining_processes(self) -> list[psutil.Process]:
        """Return the running processes of the command, including its main process."""
        return find_marked_processes(self.mark)

    def wait_until_all_ended(self, timeout_s: float = 60.0) -> None:
        """Wait until all processes of the command have ended, without killing any."""
        deadline = time.monotonic() + timeout_s
        while processes := self.remaining_processes():
            assert time.monotonic() < deadline, (
                f"still running: {[(process.pid, process.cmdline()) for process in processes]}"
            )
            self.process.poll()
            time.sleep(0.05)


def find_marked_processes(mark: str) -> list[psutil.Process]:
    """Return the processes with this mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process without variables of launchers, and with `variables`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in ("RANK", "WORLD_SIZE")
    }
    return inherited | {"COLUMNS": "200"} | variables


def start(*words: str | Path, at: Path, program: Sequence[str] | None = None, **env: str) -> Running:
    """Start a command in the folder `at`, with the variables `env`.

    program: the command line of a new process. None: a process that is forked, which starts faster.
    """
    mark = uuid.uuid4().hex
    out, err = tempfile.NamedTemporaryFile("w"), tempfile.NamedTemporaryFile("w")  # noqa: SIM115 (closed with the command)
    environ = clean_environment(**env, **{MARK: mark})
    arguments = [str(word) for word in words]
    if program is None:
        return Running(warm.start(arguments, at, environ, out.name, err.name), mark, out, err)
    process = subprocess.Popen(
        [*program, *arguments],
        cwd=at,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    return Running(process, mark, out, err)


def paceline(
    *words: str | Path,
    at: Path,
    timeout_s: float = TIMEOUT_S,
    program: Sequence[str] | None = None,
    **env: str,
) -> Result:
    """Run a command to its end in the folder `at`. The parameters are those of `start`."""
    with start(*words, at=at, program=program, **env) as running:
        return running.wait(timeout_s)


def succeed(*words: str | Path, at: Path, **options: object) -> Result:
    """Run a command, which must succeed."""
    result = paceline(*words, at=at, **options)  # type: ignore[arg-type]
    assert result.status == 0, result.all
    return result


MAIN_WITH_IMPORT_LIST = """
import atexit, sys
from pathlib import Path
atexit.register(lambda path: path.write_text(" ".join(sys.modules)), Path("imported").absolute())
from paceline.cli import main
main()
"""


def run_and_list_imports(*words: str | Path, at: Path) -> tuple[Result, set[str]]:
    """Run a command. Return its result and the names of all modules that it imported."""
    result = paceline(*words, at=at, program=(sys.executable, "-c", MAIN_WITH_IMPORT_LIST))
    return result, {*(at / "imported").read_text().split()}


def read_events(run: Path) -> list[Event]:
    path = RunFolder(run).events
    return list(events.read(path)) if path.exists() else []


def events_of_kind(run: Path, kind: type[E]) -> list[E]:
    return [event for event in read_events(run) if isinstance(event, kind)]


def last_step(run: Path) -> int:
    """Return the last step in the events of a run, or 0."""
    return max((event.step for event in read_events(run) if isinstance(event, Step)), default=0)


def checkpoint_weights(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the unsharded weights of the checkpoint of a step, or of the last complete checkpoint."""
    from paceline.training.checkpoint.integrity import find_last_complete
    from paceline.training.checkpoint.stored import load_weights

    path = RunFolder(run).checkpoint(step) if step is not None else find_last_complete(RunFolder(run))[0]
    assert path is not None, f"{run} has no checkpoint"
    return {name: tensor.numpy() for name, tensor in load_weights(path).items()}


def unequal_tensors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """Return the names of the tensors that differ in any bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name].tobytes() != expected[name].tobytes()]

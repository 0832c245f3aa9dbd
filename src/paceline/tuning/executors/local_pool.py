"""Start trials on a fixed set of ranks of this machine, and notice when they end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.launch.fork_server import ForkServer, is_safe, start_server
from paceline.launch.spawn import Child
from paceline.tuning.executors.trial_process import WORDS

START_S = 180.0  # for importing torch on a busy machine
STOP_S = 40.0  # for a trial to save after a request to stop
POLL_S = 0.02


@dataclass
class RunningTrial:
    """A trial that trains. slots: the numbers of the ranks of the pool that it occupies.

    started: by the monotonic clock. log: what its process prints, after the output of earlier starts.
    """

    number: int
    process: Child
    slots: list[int]
    started: float
    log: Path
    log_begin: int

    def read_output(self) -> str:
        """Return what the process has printed since this start."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_begin)
            return file.read().decode(errors="replace")
        return ""

    def stop(self) -> None:
        """Ask the ranks to save and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def warm_server() -> Iterator[ForkServer | None]:
    """Yield a process that imports PyTorch while this one continues, and from which trials are forked.

    None if they must be spawned.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if not is_safe(environ):
        yield None
        return
    with (
        tempfile.TemporaryFile() as log,
        contextlib.closing(ForkServer(start_server((*WORDS, "server"), environ, log))) as server,
    ):
        yield server


class Executor:
    """A pool of ranks of this machine, which trials share.

    server: the process from which trials are forked. None: each trial imports PyTorch.
    """

    def __init__(self, ranks: int, server: ForkServer | None):
        self.free = list(range(ranks))
        self.running: dict[int, RunningTrial] = {}
        self._server = server

    def __enter__(self) -> "Executor":
        if self._server is not None:
            self._server.has_answered(START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def start(self, number: int, run: Path, log: Path, ranks: int) -> None:
        """Start the training of a run folder on free ranks."""
        slots, self.free = self.free[:ranks], self.free[ranks:]
        with open(log, "ab") as output:
            log_begin = output.tell()
            process = self._start_process(run.absolute(), output.fileno(), ranks, slots)
        self.running[number] = RunningTrial(number, process, slots, time.monotonic(), log, log_begin)

    def _start_process(self, run: Path, log: int, ranks: int, slots: list[int]) -> Child:
        environ = _choose_devices(slots)
        if self._server is not None and self._server.has_answered(0.0):
            read, write = os.pipe()
            with os.fdopen(write, "wb") as request:
                request.write(json.dumps([str(run), ranks, os.getpid()]).encode())
            try:
                with os.fdopen(os.dup(log), "wb") as file:
                    forked = self._server.fork(environ, file, read)
            finally:
                os.close(read)
            if forked is not None:
                return forked
        return subprocess.Popen(
            [sys.executable, *WORDS, str(run), str(ranks), str(os.getpid())],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )

    def collect(self) -> Iterator[tuple[RunningTrial, int]]:
        """Yield the trials that have ended since the last call, with their exit status."""
        for trial in list(self.running.values()):
            if (status := trial.process.poll()) is not None:
                del self.running[trial.number]
                self.free = sorted([*self.free, *trial.slots])
                yield trial, status

    def stop_all(self) -> None:
        """Let all trials save and end, and kill those that do not."""
        for trial in self.running.values():
            trial.stop()
        deadline = time.monotonic() + STOP_S
        while self.running and time.monotonic() < deadline:
            for _ in self.collect():
                pass
            time.sleep(POLL_S)
        for trial in self.running.values():  # its ranks end when it is gone
            with contextlib.suppress(ProcessLookupError):
                trial.process.send_signal(signal.SIGKILL)
            trial.process.wait()


def _choose_devices(slots: list[int]) -> Mapping[str, str]:
    """Return the variables that give a trial the GPUs of its slots, if there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        if not os.path.exists("/dev/nvidia0"):
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
    devices = [name for name in visible.split(",") if name]
    chosen = [devices[slot] for slot in slots if slot < len(devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {}

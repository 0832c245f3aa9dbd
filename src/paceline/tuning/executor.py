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

from paceline.cluster.limits import usable_cores
from paceline.launch.fork_server import ForkServer, is_safe, start_server
from paceline.launch.spawn import Child
from paceline.tuning.trial_process import WORDS

START_S = 180.0  # for importing torch on a busy machine
STOP_S = 40.0  # for a trial to save after a request to stop
POLL_S = 0.02


@dataclass
class RunningTrial:
    """A trial that trains. slots: the numbers of the ranks of the pool that it occupies."""

    number: int
    process: Child
    slots: list[int]
    started: float  # by the monotonic clock

    def stop(self) -> None:
        """Ask the ranks to save and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)


class Executor:
    """A pool of ranks of this machine, which trials share.

    The first trial waits for the import of PyTorch; later trials are forked.
    """

    def __init__(self, ranks: int):
        self.free = list(range(ranks))
        self.running: dict[int, RunningTrial] = {}
        self.busy_s = 0.0  # seconds of ranks that trials occupied
        self._server: ForkServer | None = None
        self._size = ranks

    def __enter__(self) -> "Executor":
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if is_safe(environ):
            with tempfile.TemporaryFile() as log:
                self._server = ForkServer(start_server((*WORDS, "server"), environ, log))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop_all()
        finally:
            if self._server is not None:
                self._server.close()

    @property
    def threads(self) -> int:
        """Threads of a rank, such that all ranks of the pool have a share of the cores."""
        return max(1, usable_cores() // self._size)

    def start(self, number: int, run: Path, log: Path, ranks: int) -> None:
        """Start the training of a run folder on free ranks."""
        slots, self.free = self.free[:ranks], self.free[ranks:]
        with open(log, "ab") as output:
            process = self._start_process(run.absolute(), output.fileno(), ranks, slots)
        self.running[number] = RunningTrial(number, process, slots, time.monotonic())

    def _start_process(self, run: Path, log: int, ranks: int, slots: list[int]) -> Child:
        environ = _choose_devices(slots)
        if self._server is not None and self._server.has_answered(START_S):
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
                self.busy_s += len(trial.slots) * (time.monotonic() - trial.started)
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

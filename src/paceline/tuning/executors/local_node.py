"""This machine as a node of a study: trials are forked from a process that has imported PyTorch."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from paceline.launch.fork_server import ForkServer, is_safe, start_server
from paceline.launch.spawn import Child
from paceline.tuning.executors.trial_process import WORDS

START_S = 180.0  # for importing torch on a busy machine


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


class LocalNode:
    """Ranks of this machine.

    cores: the number of cores that are free for trials.
    server: the process from which trials are forked. None: each trial imports PyTorch.
    """

    name = "localhost"
    is_lost = False

    def __init__(self, ranks: int, cores: float, server: ForkServer | None):
        self.ranks, self._cores, self._server = ranks, cores, server

    def wait_until_ready(self) -> float:
        if self._server is not None:
            self._server.has_answered(START_S)
        return self._cores

    def check(self) -> None:
        """Do nothing: this machine is not lost."""

    def start(
        self, run: Path, log: Path, ranks: int, slots: Sequence[int], hosts: Sequence[str] = ()
    ) -> Child:
        with open(log, "ab") as output:
            words = ["train", str(run), str(ranks), ",".join(hosts), str(os.getpid())]
            return start_process(self._server, words, _choose_devices(slots), output)

    def watch(self, child: Child) -> int | None:
        with contextlib.suppress(OSError):  # a kernel before 5.3
            return os.pidfd_open(child.pid)
        return None


def start_process(
    server: ForkServer | None, words: Sequence[str], environ: Mapping[str, str], output: IO[bytes]
) -> Child:
    """Fork or spawn a process with these arguments (see `trial_process.main`).

    environ: additional variables. output: the file for its standard error.
    """
    if server is not None and server.has_answered(0.0):
        read, write = os.pipe()
        with os.fdopen(write, "wb") as request:
            request.write(json.dumps(words).encode())
        try:
            forked = server.fork(environ, output, read)
        finally:
            os.close(read)
        if forked is not None:
            return forked
    return subprocess.Popen(
        [sys.executable, *WORDS, *words],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,
    )


def _choose_devices(slots: Sequence[int]) -> Mapping[str, str]:
    """Return the variables that give a trial the GPUs of its slots, if there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        if not os.path.exists("/dev/nvidia0"):
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
    devices = [name for name in visible.split(",") if name]
    chosen = [devices[slot] for slot in slots if slot < len(devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {}

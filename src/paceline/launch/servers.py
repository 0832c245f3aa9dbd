"""Start the ranks of a parameter server: a worker that is killed ends only itself. (torchrun's agent ends all ranks when one dies.)"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from paceline.launch.signals import stop_signals
from paceline.run import RunFolder

POLL_S = 0.1
LAST_WORDS_S = 5.0  # for ranks that have lost a server
SAVING_S = 30.0  # for ranks that were asked to stop; as torchrun's agent does

Processes = dict[int, "subprocess.Popen[bytes]"]


def launch(run: RunFolder, ranks: int, servers: int, restarts: int) -> None:
    """Returns when all ranks are done. Raises ChildFailedError for a server that died or a rank that failed, after so many restarts of
    all, and SignalException when this process was asked to stop."""
    for attempt in range(restarts + 1):
        failed = _run(run, ranks, servers, attempt)
        if not failed:
            return
    raise ChildFailedError("paceline", {rank: ProcessFailure(rank, pid, status, os.devnull) for rank, (pid, status) in failed.items()})


def _run(run: RunFolder, ranks: int, servers: int, attempt: int) -> dict[int, tuple[int, int]]:
    """Of those that failed the process and its exit status."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = {number: signal.signal(number, _stop) for number in stop_signals()}
    running: Processes = {}
    try:
        for rank in range(ranks):
            running[rank] = _start(run, rank, ranks, attempt, store.port)
        failed = _watch(running, servers)
        _wait(running, LAST_WORDS_S)
        return failed
    except SignalException:
        for process in running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        _wait(running, SAVING_S)
        raise
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"asked to stop by signal {number}", signal.Signals(number))


def _start(run: RunFolder, rank: int, ranks: int, attempt: int, port: int) -> "subprocess.Popen[bytes]":
    """With what torchrun's agent would say to it."""
    environ = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run.path.name,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environ.setdefault("OMP_NUM_THREADS", "1")
    with open(run.rank_log(rank, attempt), "wb") as log:
        command = [sys.executable, "-m", "paceline", "rank", str(run.path), str(os.getpid())]
        return subprocess.Popen(command, env=environ, stderr=log, start_new_session=True)


def _watch(running: Processes, servers: int) -> dict[int, tuple[int, int]]:
    """Until all are done, or one has failed that matters."""
    while True:
        over = {rank: process.returncode for rank, process in running.items() if process.poll() is not None}
        failed = {rank: (running[rank].pid, status) for rank, status in over.items() if status > 0 or (status < 0 and rank < servers)}
        if failed or len(over) == len(running):
            return failed
        time.sleep(POLL_S)


def _wait(running: Processes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in running.values()):
        time.sleep(POLL_S)

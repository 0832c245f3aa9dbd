"""A pool of gloo ranks that stay alive and run one function after another, each in a new process group.

ranks = Ranks(4); ranks(function, *args, timeout_s=60)   # the results of function(*args) by rank
"""

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch.distributed as dist

from paceline.distributed.network_interface import use_loopback
from paceline.distributed.store import LOOPBACK, open_store
from paceline.errors import Error, RankError
from paceline.launch.launchers import check_count
from paceline.units import numbered
from paceline.user_code import LOST_PEER

START_S = 180.0  # for importing torch on a busy machine
GRACE_S = 3.0  # for the answers of the other ranks after a failure
LOG_LINES = 12  # last lines of the output of a failed rank


@dataclass
class _PoolRank:
    """A rank, the pipe to it, and the file with its output."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    output: IO[bytes]

    def read_output(self) -> str:
        """Return the last lines of the output, indented."""
        file = self.output.fileno()
        text = os.pread(file, 8000, max(0, os.fstat(file).st_size - 8000)).decode(errors="replace")
        return "\n".join(f"  {line}" for line in text.splitlines()[-LOG_LINES:])


@dataclass(frozen=True)
class _Answer:
    """The result of a call on a rank."""

    value: Any = None
    error: Error | None = None  # an expected error, with a message for users
    failure: str | None = None  # any other error, as text


class Ranks:
    """A pool of processes on this machine.

    They are started by the first call, and by the first call after a failure.
    """

    def __init__(self, size: int):
        self.size = size
        self._running: list[_PoolRank] = []
        self._store: dist.TCPStore | None = None
        self._ready = False

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, which are started if necessary."""
        self.start()
        return [rank.process.pid for rank in self._running]

    def start(self) -> None:
        """Start the processes if they are not running, without waiting for them.

        Raises LaunchError for too many ranks.
        """
        if self._running:
            return
        check_count(self.size)
        self._store = open_store()
        for rank in range(self.size):
            pipe, remote = Pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.size,
                "LOCAL_WORLD_SIZE": self.size,
            }
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline.launch.rank_pool",
                    str(remote.fileno()),
                    str(self._store.port),
                    str(os.getpid()),
                ],
                env=os.environ
                | {name: str(value) for name, value in variables.items()}
                | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            remote.close()
            self._running.append(_PoolRank(process, pipe, output))

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Return the results of `function(*args)` on all ranks.

        Raises the Error that all ranks raised, or RankError if a rank failed, died or did not answer in time.
        """
        self.start()
        if not self._ready:
            self._collect_results(self._receive_answers(START_S), START_S)
            self._ready = True
        for rank in self._running:
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send_bytes(pickle.dumps((function, args, timeout_s)))
        return self._collect_results(self._receive_answers(timeout_s + GRACE_S), timeout_s)

    def _collect_results(self, answers: dict[int, _Answer], timeout_s: float) -> list[Any]:
        """Return the results by rank.

        Raises if a rank failed, and ends the ranks that then wait for one another.
        """
        if errors := [answer.error for answer in answers.values() if answer.error is not None]:
            if len(errors) < self.size:
                self.end()
            raise errors[0]
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        missing = sorted(set(range(self.size)) - answers.keys())
        if failures or missing:
            outputs = {rank: self._running[rank].read_output() for rank in missing}
            self.end()
            causes = {
                rank: failure for rank, failure in failures.items() if not LOST_PEER.search(failure)
            } or failures
            if causes:
                rank = min(causes)
                raise RankError(f"rank {rank} failed: {causes[rank]}")
            raise RankError(
                f"no answer from {numbered('rank', missing)} in {timeout_s:.0f} "
                f"s{_quote_output(outputs[missing[0]])}"
            )
        return [answers[rank].value for rank in range(self.size)]

    def _receive_answers(self, timeout_s: float) -> dict[int, _Answer]:
        """Return the answers that arrive in time, by rank.

        After a failure the others have only GRACE_S left.
        """
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {entry.pipe: rank for rank, entry in enumerate(self._running) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = self._receive(waiting[pipe], pipe)
                answers[waiting[pipe]] = answer
                if answer.failure is not None or answer.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _receive(self, rank: int, pipe: Connection) -> _Answer:
        try:
            answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            status = self._running[rank].process.wait()
            how = (
                f"it was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"it ended with exit status {status}"
            )
            return _Answer(failure=how + _quote_output(self._running[rank].read_output()))
        assert isinstance(answer, _Answer)
        return answer

    def end(self) -> None:
        """Kill the processes."""
        for rank in self._running:
            rank.pipe.close()
            rank.process.kill()
            rank.process.wait()
            rank.output.close()
        self._running, self._store, self._ready = [], None, False


def _quote_output(text: str) -> str:
    return f"; the end of its output:\n{text}" if text else ""


def _serve_calls(pipe: Connection, port: int, launcher: int) -> None:
    """Run the functions that arrive through the pipe, until it is closed."""
    threading.Thread(target=_exit_if_orphaned, args=(launcher,), daemon=True).start()
    use_loopback()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    pipe.send_bytes(pickle.dumps(_Answer("ready")))
    for call in itertools.count():
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        answer = _Answer(failure="it could not read the request")
        try:
            function, args, timeout_s = pickle.loads(request)
            call_store = dist.PrefixStore(str(call), store)
            dist.init_process_group(
                "gloo", store=call_store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()  # no rank may end before all are connected
            answer = _Answer(function(*args))
            dist.barrier()
        except Error as error:
            answer = _Answer(error=error)
        except Exception as error:  # the top of a rank
            answer = _Answer(failure=f"{type(error).__name__}: {str(error).strip() or 'no message'}")
        pipe.send_bytes(pickle.dumps(answer))
        if dist.is_initialized():
            dist.destroy_process_group()


def _exit_if_orphaned(launcher: int) -> None:
    """End this rank if the process that started it is gone."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    from paceline.launch import rank_pool

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the pool ends its ranks
    rank_pool._serve_calls(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))

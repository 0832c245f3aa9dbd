"""Real ranks over gloo that stay, and run one function after another, each in a process group of its own.

ranks = Ranks(4); ranks.start(); ranks(function, *args, timeout_s=60)   -> what function(*args) returned on each rank
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

START_S = 180.0  # to import torch, on a busy machine
GRACE_S = 3.0  # for the other ranks, after one has failed
LOG_LINES = 12  # of a rank that died


@dataclass
class _PoolRank:
    process: subprocess.Popen[bytes]
    pipe: Connection
    output: IO[bytes]

    def last_words(self) -> str:
        file = self.output.fileno()
        text = os.pread(file, 8000, max(0, os.fstat(file).st_size - 8000)).decode(errors="replace")
        return "\n".join(f"  {line}" for line in text.splitlines()[-LOG_LINES:])


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: Error | None = None  # one that is meant
    failure: str | None = None  # another one


class Ranks:
    """So many processes on this machine. They are started by the first call, and again by the one after a failure."""

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
        """Of the processes, once they are started."""
        self.start()
        return [rank.process.pid for rank in self._running]

    def start(self) -> None:
        """Start the processes that are not there, without waiting for them. Raises LaunchError for more than the machine starts."""
        if self._running:
            return
        check_count(self.size)
        self._store = open_store()
        for rank in range(self.size):
            here, there = Pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline.launch.rank_pool",
                    str(there.fileno()),
                    str(self._store.port),
                    str(os.getpid()),
                ],
                env=os.environ
                | {name: str(value) for name, value in names.items()}
                | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            there.close()
            self._running.append(_PoolRank(process, here, output))

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Raises the Error that all ranks raised, RankError when one of them failed, died or did not answer in time."""
        self.start()
        if not self._ready:
            self._taken(self._answers(START_S), START_S)
            self._ready = True
        for rank in self._running:
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send_bytes(pickle.dumps((function, args, timeout_s)))
        return self._taken(self._answers(timeout_s + GRACE_S), timeout_s)

    def _taken(self, answers: dict[int, _Answer], timeout_s: float) -> list[Any]:
        """What the ranks returned; raises, and ends them, where not all of them did."""
        if errors := [answer.error for answer in answers.values() if answer.error is not None]:
            if len(errors) < self.size:
                self.end()
            raise errors[0]
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        missing = sorted(set(range(self.size)) - answers.keys())
        if failures or missing:
            words = {rank: self._running[rank].last_words() for rank in missing}
            self.end()
            own = {
                rank: failure for rank, failure in failures.items() if not LOST_PEER.search(failure)
            } or failures
            if own:
                raise RankError(
                    "; ".join(f"rank {rank} failed: {failure}" for rank, failure in sorted(own.items())[:1])
                )
            raise RankError(
                f"no answer from {numbered('rank', missing)} in {timeout_s:.0f} s{_quoted(words[missing[0]])}"
            )
        return [answers[rank].value for rank in range(self.size)]

    def _answers(self, timeout_s: float) -> dict[int, _Answer]:
        """Of those ranks that answer in time; after a failure the others have less of it."""
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {rank.pipe: at for at, rank in enumerate(self._running) if at not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = self._answer(waiting[pipe], pipe)
                answers[waiting[pipe]] = answer
                if answer.failure is not None or answer.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _answer(self, rank: int, pipe: Connection) -> _Answer:
        try:
            answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            status = self._running[rank].process.wait()
            how = (
                f"it was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"it ended with exit status {status}"
            )
            return _Answer(failure=how + _quoted(self._running[rank].last_words()))
        assert isinstance(answer, _Answer)
        return answer

    def end(self) -> None:
        for rank in self._running:
            rank.pipe.close()
            rank.process.kill()
            rank.process.wait()
            rank.output.close()
        self._running, self._store, self._ready = [], None, False


def _quoted(words: str) -> str:
    return f"; the end of its output:\n{words}" if words else ""


def _be_a_rank(pipe: Connection, port: int, launcher: int) -> None:
    threading.Thread(target=_leave_if_orphaned, args=(launcher,), daemon=True).start()
    use_loopback()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    pipe.send_bytes(pickle.dumps(_Answer("ready")))
    for call in itertools.count():
        try:
            question = pipe.recv_bytes()
        except EOFError:
            return
        answer = _Answer(failure="it could not read what to do")
        try:
            function, args, timeout_s = pickle.loads(question)
            own = dist.PrefixStore(str(call), store)
            dist.init_process_group(
                "gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()  # all are connected, before one can be done
            answer = _Answer(function(*args))
            dist.barrier()
        except Error as error:
            answer = _Answer(error=error)
        except Exception as error:  # the top of a rank
            answer = _Answer(failure=f"{type(error).__name__}: {str(error).strip() or 'no message'}")
        pipe.send_bytes(pickle.dumps(answer))
        if dist.is_initialized():
            dist.destroy_process_group()


def _leave_if_orphaned(launcher: int) -> None:
    """Who started the ranks may have been killed, and they wait for one another."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    from paceline.launch import rank_pool

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all: who started the ranks ends them
    rank_pool._be_a_rank(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))

"""A pool of gloo ranks that stay alive and run one function after another, each in a new process group.

The ranks of all pools of a process are forked from one fork server (paceline.launch.fork_server), or spawned
where that is not safe.

ranks = Ranks(4); ranks(function, *args, timeout_s=60)   # the results of function(*args) by rank
"""

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch.distributed as dist

from paceline.distributed.network_interface import use_loopback
from paceline.distributed.store import LOOPBACK, open_store
from paceline.errors import Error, RankError
from paceline.launch.fork_server import Forked, ForkServer, is_safe, start_server
from paceline.launch.launchers import check_count
from paceline.launch.spawn import Child
from paceline.units import numbered
from paceline.user_code import LOST_PEER

START_S = 180.0  # for importing torch on a busy machine
GRACE_S = 3.0  # for the answers of the other ranks after a failure
LOG_LINES = 12  # last lines of the output of a failed rank


class _SharedForkServer:
    """The fork server of this process. It runs while pools use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._server: ForkServer | None = None

    def acquire(self) -> None:
        """Start the server, unless it runs or forks are not safe."""
        with self._lock:
            self._users += 1
            environ = {"OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            if self._server is None and is_safe(environ):
                with tempfile.TemporaryFile() as log:
                    self._server = ForkServer(start_server((*WORDS, "fork"), environ, log))

    def release(self) -> None:
        """End the server if no other pool uses it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._server is not None:
                self._server.close()
                self._server = None

    def fork(self, environ: Mapping[str, str], log: IO[bytes], pipe: int) -> Forked | None:
        """Return a forked rank, or None if ranks must be spawned. Waits until the server is ready."""
        with self._lock:
            if self._server is None or not self._server.has_answered(START_S):
                return None
            return self._server.fork(environ, log, pipe)


WORDS = ("-m", "paceline.launch.rank_pool")
_server = _SharedForkServer()


@functools.cache
def keep_server() -> None:
    """Let the fork server run until this process ends, so that later pools start at once."""
    _server.acquire()
    atexit.register(_server.release)


@dataclass(frozen=True)
class _Surroundings:
    """What a rank takes over from the process that starts it."""

    store_port: int
    launcher: int  # process id
    folder: str
    modules: tuple[str, ...]  # sys.path
    environ: dict[str, str]


@dataclass
class _PoolRank:
    """A rank, the pipe to it, and the file with its output."""

    process: Child
    pipe: Connection
    output: IO[bytes]
    shown: int = 0  # bytes of the output that read_new_output has returned

    def read_new_output(self, whole_lines: bool) -> str:
        """Return the output since the last call."""
        new = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size - self.shown, self.shown)
        if whole_lines:
            new = new[: new.rfind(b"\n") + 1]
        self.shown += len(new)
        return new.decode(errors="replace")

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
        self._has_server = False
        self._ready = False
        self._output_lock = threading.Lock()
        self._last_output: str | None = None  # of ranks that were killed; None: nobody reads it

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, which are started if necessary."""
        self._start_ranks()
        return [rank.process.pid for rank in self._running]

    def start(self) -> None:
        """Start what takes longest, the import of torch, without waiting for it.

        Raises LaunchError for too many ranks.
        """
        check_count(self.size)
        if not self._has_server:
            _server.acquire()
            self._has_server = True

    def _start_ranks(self) -> None:
        if self._running:
            return
        self.start()
        self._store = open_store()
        for rank in range(self.size):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.size,
                "LOCAL_WORLD_SIZE": self.size,
            }
            self._running.append(
                _start_rank({name: str(value) for name, value in variables.items()}, self._store.port)
            )

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Return the results of `function(*args)` on all ranks.

        Raises the Error that all ranks raised, or RankError if a rank failed, died or did not answer in time.
        """
        # After an exception, such as an interrupt, the next call must not get the answers of this one.
        try:
            self._start_ranks()
            if not self._ready:
                self._collect_results(self._receive_answers(START_S), START_S)
                self._ready = True
            for rank in self._running:
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send_bytes(pickle.dumps((function, args, timeout_s)))
            answers = self._receive_answers(timeout_s + GRACE_S)
        except BaseException:
            self._kill()
            raise
        return self._collect_results(answers, timeout_s)

    def _collect_results(self, answers: dict[int, _Answer], timeout_s: float) -> list[Any]:
        """Return the results by rank.

        Raises if a rank failed, and ends the ranks that then wait for one another.
        """
        if errors := [answer.error for answer in answers.values() if answer.error is not None]:
            if len(errors) < self.size:
                self._kill()
            raise errors[0]
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        missing = sorted(set(range(self.size)) - answers.keys())
        if failures or missing:
            outputs = {rank: self._running[rank].read_output() for rank in missing}
            self._kill()
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
            status = self._running[rank].process.wait() or 0
            how = (
                f"it was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"it ended with exit status {status}"
            )
            return _Answer(failure=how + _quote_output(self._running[rank].read_output()))
        assert isinstance(answer, _Answer)
        return answer

    def read_new_output(self, whole_lines: bool = False) -> str:
        """Return what the ranks printed since the last call, by rank. Another thread may call it."""
        with self._output_lock:
            text, self._last_output = self._last_output or "", ""
            return text + "".join(rank.read_new_output(whole_lines) for rank in self._running)

    def _kill(self) -> None:
        for rank in self._running:
            rank.pipe.close()
            rank.process.send_signal(signal.SIGKILL)
            rank.process.wait()
        with self._output_lock:
            for rank in self._running:
                if self._last_output is not None:
                    self._last_output += rank.read_new_output(whole_lines=False)
                rank.output.close()
            self._running, self._store, self._ready = [], None, False

    def end(self) -> None:
        """Kill the processes."""
        self._kill()
        if self._has_server:
            _server.release()
            self._has_server = False


def _start_rank(variables: dict[str, str], store_port: int) -> _PoolRank:
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    with contextlib.ExitStack() as on_error:  # an interrupt, too: without its pipe, a rank that started ends
        pipe, remote = Pipe()
        on_error.enter_context(pipe)
        output = on_error.enter_context(tempfile.TemporaryFile())
        with remote:
            process: Child | None = _server.fork(variables, output, remote.fileno())
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, *WORDS, str(remote.fileno())],
                    env=environ,
                    pass_fds=[remote.fileno()],
                    stderr=output,
                )
        surroundings = _Surroundings(store_port, os.getpid(), os.getcwd(), tuple(sys.path), environ)
        with contextlib.suppress(BrokenPipeError):  # the rank has ended already; the first call reports it
            pipe.send_bytes(pickle.dumps(surroundings))
        on_error.pop_all()  # `_kill` closes both
    return _PoolRank(process, pipe, output)


def _quote_output(text: str) -> str:
    return f"; the end of its output:\n{text}" if text else ""


def _serve_calls(pipe: Connection) -> None:
    """Run the functions that arrive through the pipe, until it is closed."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        surroundings = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return
    assert isinstance(surroundings, _Surroundings)
    os.chdir(surroundings.folder)
    os.environ.clear()
    os.environ.update(surroundings.environ)
    sys.path[:] = surroundings.modules
    threading.Thread(target=_exit_if_orphaned, args=(surroundings.launcher,), daemon=True).start()
    use_loopback()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(LOOPBACK, surroundings.store_port, is_master=False)
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


def main() -> None:
    """Be a rank: `rank_pool PIPE`. Be the fork server of ranks: `rank_pool fork SOCKET`."""
    # Ctrl-C reaches all processes of a terminal; the pool ends its ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = int(sys.argv[-1])
    if sys.argv[1:-1] == ["fork"]:
        import paceline.training.train  # noqa: F401 (what most functions need)
        from paceline.launch.fork_ranks import serve

        forked = serve(pipe)
        if forked is None:
            return
        _, [pipe] = forked
    _serve_calls(Connection(pipe))


if __name__ == "__main__":
    from paceline.launch import rank_pool  # so that pickle finds the classes by their module

    rank_pool.main()

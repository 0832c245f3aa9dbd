"""The fork server: a process that imports what every rank needs, and forks ranks for its parent.

A rank spends most of its start importing torch, and transformers for a task `hf:`. The fork server imports
them once, runs no operator and imports no user code. A forked rank becomes a child of the launcher, which is
a child subreaper at that moment. So, as for a spawned rank, the launcher waits for it, and the rank sees by
its parent when the launcher is gone. If the fork server dies, its ranks continue.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from paceline.launch.spawn import (
    Child,
    RankProcess,
    build_rank_arguments,
    build_shared_environment,
    mark_unfinished,
    spawn,
)
from paceline.run import RunFolder
from paceline.spec import HF_TASK, Launch, Spec

ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
LOG = "fork_server.txt"
READY, UNSAFE, GO = b"ready", b"unsafe", b"go"
# A variable that reserves memory in the block that the system shows as the environment of a process.
ROOM, ROOM_BYTES = "PACELINE_ROOM", 1000
MAX_REQUEST_BYTES = 2**16
MAX_FILES = 3  # that a request carries
PR_SET_CHILD_SUBREAPER = 36  # Linux, sys/prctl.h


def is_safe(environ: Mapping[str, str], num_threads: int = 1) -> bool:
    """Return whether a fork of a process with this environment works like a new process.

    Threads do not survive a fork, and OpenBLAS starts some unless a variable says one. The driver of an
    accelerator may hold state of the process after the import of torch, so ranks are spawned on machines with
    an accelerator.
    """
    has_accelerator = any(os.path.exists(device) for device in ACCELERATORS)
    return (
        sys.platform == "linux"
        and not has_accelerator
        and num_threads == 1
        and environ.get("OPENBLAS_NUM_THREADS", environ.get("OMP_NUM_THREADS")) == "1"
    )


# In the launcher


@dataclass
class Forked:
    """A child of this process that another process forked."""

    pid: int
    _status: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored, so there is no status, as for subprocess.Popen
                pid, status = self.pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ServerProcess(NamedTuple):
    """A process that has become a fork server, and the socket to it."""

    socket: socket.socket
    process: Child


def make_sockets() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets for a fork server and the process that requests forks."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start_server(words: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> ServerProcess:
    """Start Python as a fork server.

    words: the arguments with which Python becomes the fork server (see `fork_ranks.serve`). The descriptor of
        a socket is added to them.
    environ: its environment.
    log: the file for its standard error.
    """
    own, remote = make_sockets()
    with remote:
        return ServerProcess(own, _start_process(words, environ, remote.fileno(), log.fileno()))


def _start_process(words: Sequence[str], environ: Mapping[str, str], remote: int, log: int) -> Child:
    return subprocess.Popen(
        [sys.executable, *words, str(remote)],
        env={ROOM: "-" * ROOM_BYTES, **environ},
        stderr=log,
        pass_fds=[remote],
        start_new_session=True,
    )


class ForkServer:
    """A process that forks itself on request."""

    def __init__(self, server: ServerProcess):
        self._socket, self._process = server
        self._is_ready: bool | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_answered(self, timeout_s: float) -> bool:
        """Return whether the server has reported if it can be forked."""
        if self._is_ready is None and select.select([self._socket], [], [], timeout_s)[0]:
            self._is_ready = self._receive() == READY
        return self._is_ready is not None

    def fork(self, environ: Mapping[str, str], log: IO[bytes], *files: int) -> Forked | None:
        """Fork a process, which is then a child of this process. Return None if that is not possible.

        environ: additional variables.
        log: the file for its standard error.
        files: descriptors that the process receives.
        """
        if not self._is_ready:
            return None
        request = _encode_environment(environ)
        go_reader, go_writer = os.pipe()
        with (
            os.fdopen(go_writer, "wb", 0) as go,
            os.fdopen(go_reader, "rb", 0),
            adopt_descendants(),
        ):
            try:
                socket.send_fds(self._socket, [request], [log.fileno(), go_reader, *files])
            except OSError:  # the fork server is gone
                pid = 0
            else:
                pid = int(self._receive() or 0)
            if not pid or not _is_child(pid):
                self._is_ready = False
                return None  # a process that it may have forked ends, since it does not receive GO
            with contextlib.suppress(BrokenPipeError):  # the process was killed; `wait` reports it
                go.write(GO)
        return Forked(pid)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(MAX_REQUEST_BYTES)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class RankForkServer(ForkServer):
    """Starts the ranks of a run by forking, or by `spawn` if forking is not possible.

    task_file: a task that another process sent (see `launch.sent_task`).
    """

    node = "localhost"

    def __init__(self, server: ServerProcess, task_file: Path | None = None):
        super().__init__(server)
        self._task_file = task_file

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> RankProcess:
        """Start a rank with these variables, whose standard error goes to `log`."""
        unfinished = mark_unfinished(RunFolder(run), int(environ["RANK"]))
        with open(log, "wb") as file:
            forked = self.fork(environ, file)
        if forked is None:
            return spawn(run, environ, log, self._task_file)
        return RankProcess(forked, unfinished)


@contextlib.contextmanager
def fork_server(run: RunFolder, ranks: int, task_file: Path | None = None) -> Iterator[RankForkServer | None]:
    """Yield a fork server that runs until the context ends, or None if ranks must be spawned."""
    environ = build_shared_environment(ranks)
    if ranks < 2 or not is_safe(environ):
        yield None
        return
    run.ranks.mkdir(exist_ok=True)
    with (
        open(run.ranks / LOG, "wb") as log,
        contextlib.closing(
            RankForkServer(start_server(build_rank_arguments(run.path, task_file), environ, log), task_file)
        ) as server,
    ):
        yield server


@contextlib.contextmanager
def early_fork_server(spec: Spec, launch: Launch, path: Path) -> Iterator[RankForkServer | None]:
    """Yield a fork server that imports while this process still checks the request.

    None if the number of ranks is not known yet, or if ranks must be spawned. Call `move_log` when the run
    folder exists. path: of the run folder, before it is created.
    """
    ranks = launch.ranks or 1
    environ = build_shared_environment(ranks)
    is_local = launch.launcher in (None, "local") and launch.nodes == 1
    if not is_local or ranks < 2 or launch.nsys or not is_safe(environ):
        yield None
        return
    folder = spec.set.get("folder") if spec.task == HF_TASK else None
    early_log = find_early_log(path)
    try:
        log = open(early_log, "xb")  # noqa: SIM115 (closed below)
    except OSError:  # `create` makes the folder, or reports why it cannot
        yield None
        return
    try:
        words = build_rank_arguments(path, None, folder)
        with log, contextlib.closing(RankForkServer(start_server(words, environ, log))) as server:
            yield server
    finally:
        early_log.unlink(missing_ok=True)


def move_log(run: RunFolder) -> None:
    """Move the log of an early fork server into the run folder."""
    run.ranks.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # the file was deleted
        find_early_log(run.path).rename(run.ranks / LOG)


def find_early_log(path: Path) -> Path:
    """Return the log of an early fork server, next to the future run folder."""
    return path.with_name(f".{path.name}-{LOG}")


@contextlib.contextmanager
def adopt_descendants() -> Iterator[None]:
    """Make this process the parent of the children of descendants that end, until the context ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


# Requests


def _encode_environment(environ: Mapping[str, str]) -> bytes:
    return b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items())

"""A process that has imported what every rank needs, and forks a rank whenever the launcher asks for one.

A rank spends most of its start importing torch. The fork server does it once, runs no operator and imports no code of the user's. A rank
that it forks becomes a child of the launcher, which is a child subreaper for that moment: as for a spawned rank, the launcher waits for
it, and the rank sees by its parent that the launcher is gone. A fork server that dies takes no rank with it.
"""

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.spawn import RankProcess, begin, environment, rank_words, spawn
from paceline.run import RunFolder

ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
READY, UNSAFE, GO = b"ready", b"unsafe", b"go"
ROOM, ROOM_BYTES = (
    "PACELINE_ROOM",
    1000,
)  # in the memory that the system shows as the environment of a process
LONGEST = 2**16  # bytes of a request
PR_SET_CHILD_SUBREAPER = 36  # Linux, sys/prctl.h


def is_safe(environ: Mapping[str, str], num_threads: int = 1) -> bool:
    """Return whether a fork of a process with this environment works like a process of its own.

    Threads do not survive a fork, and OpenBLAS starts one for each of OMP_NUM_THREADS. The driver of an accelerator may hold state of the
    process from the import of torch on: on machines that have one, every rank is spawned.
    """
    has_accelerator = any(os.path.exists(device) for device in ACCELERATORS)
    return (
        sys.platform == "linux"
        and not has_accelerator
        and num_threads == 1
        and environ.get("OMP_NUM_THREADS") == "1"
    )


# In the launcher


@dataclass
class _Forked:
    """A child of this process that another one has forked."""

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
            except ChildProcessError:  # SIGCHLD is ignored: there is no status, as for subprocess.Popen
                pid, status = self.pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkServer:
    """Starts ranks of a run by forking them, or by `spawn` where that is not possible."""

    node = "localhost"

    def __init__(self, run: RunFolder, environ: Mapping[str, str]):
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, open(run.ranks / "imports.txt", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *rank_words(run.path), str(there.fileno())],
                env={ROOM: "-" * ROOM_BYTES, **environ},
                stderr=log,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._is_ready: bool | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_answered(self, timeout_s: float) -> bool:
        """Return whether it is known by now if ranks can be forked."""
        if self._is_ready is None and select.select([self._here], [], [], timeout_s)[0]:
            self._is_ready = self._received() == READY
        return self._is_ready is not None

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> RankProcess:
        pid = self._fork(environ, log) if self._is_ready else None
        return (
            RankProcess(_Forked(pid), begin(RunFolder(run), int(environ["RANK"])))
            if pid is not None
            else spawn(run, environ, log)
        )

    def _fork(self, environ: Mapping[str, str], log: Path) -> int | None:
        """Return the id of a process that becomes this rank; None where there is none."""
        told = _block(environ)
        go_there, go = os.pipe()
        with (
            open(log, "wb") as file,
            os.fdopen(go, "wb", 0) as go_on,
            os.fdopen(go_there, "rb", 0),
            _adopting(),
        ):
            try:
                socket.send_fds(self._here, [told], [file.fileno(), go_there])
            except OSError:  # it is gone
                pid = 0
            else:
                pid = int(self._received() or 0)
            if not pid or not _is_child(pid):
                self._is_ready = False
                return None  # what it may have forked ends, since nobody tells it to go on
            with contextlib.suppress(BrokenPipeError):  # it was killed, which is seen when it is waited for
                go_on.write(GO)
        return pid

    def _received(self) -> bytes:
        try:
            return self._here.recv(LONGEST)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._here.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def fork_server(run: RunFolder, ranks: int) -> Iterator[ForkServer | None]:
    """Start a fork server that lasts as long as the context; None where ranks are to be spawned."""
    environ = environment(ranks)
    if ranks < 2 or not is_safe(environ):
        yield None
        return
    run.ranks.mkdir(exist_ok=True)
    with contextlib.closing(ForkServer(run, environ)) as server:
        yield server


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """What a descendant of this process leaves behind when it ends becomes our child, in this context."""
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


# In the fork server


def _block(environ: Mapping[str, str]) -> bytes:
    return b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items())

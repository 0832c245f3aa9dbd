"""A command of another program, such as torchrun with a script, while this process samples the node."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from paceline.distributed.world import LAUNCHERS
from paceline.errors import LaunchError
from paceline.monitor.processes import find_descendants
from paceline.monitor.sampler import read_environment
from paceline.units import is_whole_number

SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "env", "time", "timeout", "numactl"}
# Programs that start ranks, and the modules that do
STARTERS = {"torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "srun", "accelerate", "deepspeed"}
STARTERS |= {"torch.distributed.run", "torch.distributed.launch"}
BLOCK_BYTES = 2**16
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
DRAIN_S = 2.0  # how long to wait for output of a descendant that the command left behind


class ForeignCommand:
    """A running command. Signals for this process are passed to it.

    observe: called with the name of a stream and its new bytes. None: the command has the standard streams of
        this process.
    """

    def __init__(self, words: Sequence[str], observe: Callable[[str, bytes], None] | None = None):
        environ: Mapping[str, str] = os.environ
        pipe = None
        if observe is not None:
            # A pipe instead of a terminal: Python would keep lines in a buffer.
            environ = {"PYTHONUNBUFFERED": "1", **environ}
            pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise LaunchError(f"cannot run {words[0]}: {error.strerror}") from error
        self._is_starter = not STARTERS.isdisjoint(os.path.basename(word) for word in words)
        self._threads: list[threading.Thread] = []
        if observe is not None:
            for name in ("stdout", "stderr"):
                source, sink = getattr(self._process, name), getattr(sys, name).fileno()
                thread = threading.Thread(
                    target=_copy, args=(source.fileno(), sink, name, observe), daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._pidfd = _open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` seconds, and return whether the command has ended."""
        if self._process.poll() is not None:
            return True
        if self._pidfd is not None:
            select.select([self._pidfd], [], [], timeout_s)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        return self._process.poll() is not None

    def finish(self) -> int:
        """Return the exit status, as a shell reports it: 128 and the number of a signal that ended it."""
        status = self._process.wait()
        for thread in self._threads:
            thread.join(DRAIN_S)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return status if status >= 0 else 128 - status

    def find_ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks on this node by rank.

        Without ranks, the command itself is rank 0, unless it is a program that starts ranks.
        """
        found: dict[int, int] = {}
        shells: dict[int, int] = {}
        family = [self.pid, *find_descendants(self.pid)]
        for pid in family:  # a parent before its children: workers inherit the variables of their rank
            rank = rank_of(read_environment(pid))
            if rank is not None:
                (shells if _name(pid) in SHELLS else found).setdefault(rank, pid)
        found = shells | found
        if not found:
            programs = [] if self._is_starter else [pid for pid in family if _name(pid) not in SHELLS]
            return {0: programs[0]} if programs else {}
        return found

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Pass signals to the command until the context ends. Ctrl-C reaches it anyway."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGINT or not _is_in_foreground():
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, *FORWARDED)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the rank of a process with these variables; None if no launcher set it."""
    for names in LAUNCHERS.values():
        text = environ.get(names.rank)
        if text is not None and is_whole_number(text) and names.size in environ:
            return int(text)
    return None


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _open_pidfd(pid: int) -> int | None:
    with contextlib.suppress(OSError, AttributeError):  # Linux before 5.3, other systems
        return os.pidfd_open(pid)
    return None


def _is_in_foreground() -> bool:
    """Return whether Ctrl-C in the terminal reaches all processes of this group."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _copy(source: int, sink: int, name: str, observe: Callable[[str, bytes], None]) -> None:
    """Copy a stream of the command to that of this process, and show it to `observe`."""
    is_open = True
    while data := os.read(source, BLOCK_BYTES):
        observe(name, data)
        view = memoryview(data)
        while is_open and view:
            try:
                view = view[os.write(sink, view) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # nobody reads it; the command must not stop for that
                is_open = False

"""Signals that ask a training to stop."""

import os
import signal
from types import FrameType

from paceline.monitor.processes import process_birth

STOPPED = 75  # exit status of a training that was stopped and can continue: EX_TEMPFAIL of sysexits.h


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals that ask for a stop, without those that this process ignores (nohup)."""
    candidates = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in candidates if signal.getsignal(number) != signal.SIG_IGN]


class Interrupt:
    """A request to stop. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks all ranks to save and stop.

    The second signal ends this process at once. A rank of Paceline's launcher is ended by the launcher
    instead.
    launcher: its process id. is_child: whether this process is a child of it; not so under nsys.
    """

    def __init__(self, launcher: int | None = None, is_child: bool = True) -> None:
        self.is_requested = False
        self.launcher = launcher
        self._birth = process_birth(launcher) if launcher is not None and not is_child else None
        self._is_child = is_child

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in list_stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        # A launcher ends the rank itself. Besides, Slurm sends a signal to all processes of a step, and their
        # agent passes the same signal on.
        if self.launcher is None:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_orphaned(self) -> bool:
        """Return whether the launcher of this rank was killed, so that no process would end this rank."""
        if self.launcher is None:
            return False
        if self._is_child:
            return os.getppid() != self.launcher
        return self._birth is None or process_birth(self.launcher) != self._birth

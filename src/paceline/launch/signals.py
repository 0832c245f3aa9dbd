"""Asking a training to stop."""

import os
import signal
from types import FrameType

STOPPED = 75  # exit status of a training that was stopped and can go on: EX_TEMPFAIL of sysexits.h


def stop_signals() -> list[signal.Signals]:
    """Those that ask for a stop, but what this process was told to ignore (nohup)."""
    known = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [number for number in known if signal.getsignal(number) != signal.SIG_IGN]


class Interrupt:
    """The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks all ranks to save and stop; the second one ends this process at once,
    or its launcher does."""

    def __init__(self, launcher: int | None = None) -> None:
        self.asked = False
        self.launcher = launcher

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if (
            self.launcher is None
        ):  # else it ends us itself; and Slurm tells all processes of a step what their agent passes on
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def orphaned(self) -> bool:
        """Our own launcher was killed: nobody would notice, or clean up, if this rank went on."""
        return self.launcher is not None and os.getppid() != self.launcher

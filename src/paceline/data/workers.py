"""The processes that read samples: forked from a rank, beside its other threads, and known to have started."""

import os
import select
import signal
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from types import FrameType

from paceline.errors import DataError

PATIENCE_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class _Started(popen_fork.Popen):
    """A lock that another thread holds at the fork stays locked in the child for ever. CPython before 3.11.8 has one that each thread
    of gloo takes as it lets go of a tensor (python/cpython#112275): a child that says nothing is ended, and forked again."""

    def _launch(self, process: "_WorkerReader") -> None:
        for patience_s in PATIENCE_S:
            heard, process.said = os.pipe()
            try:
                super()._launch(process)  # type: ignore[misc]
                os.close(process.said)
                if select.select([heard], [], [], patience_s)[0]:
                    return
            finally:
                os.close(heard)
            self.kill()
            self.wait()
            self.returncode = None
            self.close()
        raise DataError(
            f"a process that reads samples did not start, {len(PATIENCE_S)} times; with --workers 0 each rank reads for itself"
        )


class _WorkerReader(ForkProcess):
    said: int

    @staticmethod
    def _Popen(process: BaseProcess) -> _Started:
        return _Started(process)

    def run(self) -> None:
        os.write(self.said, b"!")
        os.close(self.said)
        super().run()


class Forked(ForkContext):
    """What `multiprocessing.get_context("fork")` is, with processes that are known to have started."""

    Process = _WorkerReader


def survive_one_signal(reader: int) -> None:
    """Who stops a training signals its whole process group; the rank still needs its readers then, to stop well."""

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, ask)

"""The worker processes that read samples: forked from a rank, and checked to have started."""

import os
import select
import signal
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from types import FrameType

from paceline.errors import DataError

PATIENCE_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class _StartedPopen(popen_fork.Popen):
    """A fork that is repeated until the child reports that it has started.

    A lock that another thread holds at the fork stays locked in the child for ever. CPython before 3.11.8 has
    a lock that each thread of gloo takes when it releases a tensor (python/cpython#112275). A child that does
    not report is ended and forked again.
    """

    def _launch(self, process: "_Reader") -> None:
        for patience_s in PATIENCE_S:
            read_end, process.write_end = os.pipe()
            try:
                super()._launch(process)  # type: ignore[misc]
                os.close(process.write_end)
                if select.select([read_end], [], [], patience_s)[0]:
                    return
            finally:
                os.close(read_end)
            self.kill()
            self.wait()
            self.returncode = None
            self.close()
        raise DataError(
            f"a worker that reads samples did not start in {len(PATIENCE_S)} attempts;"
            " to read without worker processes, use --workers 0"
        )


class _Reader(ForkProcess):
    write_end: int  # of the pipe on which the child reports that it has started

    @staticmethod
    def _Popen(process: BaseProcess) -> _StartedPopen:
        return _StartedPopen(process)

    def run(self) -> None:
        os.write(self.write_end, b"!")
        os.close(self.write_end)
        super().run()


class ForkedReaders(ForkContext):
    """The context `multiprocessing.get_context("fork")`, with processes that are checked to have started."""

    Process = _Reader


def survive_one_signal(worker: int) -> None:
    """Ignore the first signal that stops a training.

    The signal goes to the whole process group, and the rank still needs its workers to stop in order.
    """

    def ignore_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, ignore_once)

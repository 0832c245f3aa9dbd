"""The worker processes that read samples: forked from a rank, and checked to have started."""

import contextlib
import fcntl
import io
import os
import pickle
import select
import signal
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import DataError

if TYPE_CHECKING:
    AnyQueue = Queue[Any]
else:
    AnyQueue = Queue  # Python 3.11: not generic

PIPE_BYTES = 2**20  # of the queue of batches: what any user may request
MAX_COPIED_BYTES = 2**16  # of a tensor; larger ones are passed in shared memory
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


class BatchPickler(ForkingPickler):
    """Pickles a batch with the values of small tensors.

    Other tensors are passed in shared memory, as torch does. For a small tensor, this takes longer than the
    rest of the batch: the processes connect to pass its file descriptor.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a small tensor."""
        is_small = type(value) is Tensor and value.numel() * value.element_size() <= MAX_COPIED_BYTES
        if not is_small or not _is_plain(value):
            return NotImplemented
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _rebuild_tensor, (content, value.dtype, tuple(value.shape))


def _is_plain(value: Tensor) -> bool:
    is_dense = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()
    return is_dense and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())


def _rebuild_tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


class _PickledBatch:
    """A batch that `BatchPickler` has pickled, which becomes the batch when it is received."""

    def __init__(self, batch: Any):
        file = io.BytesIO()
        BatchPickler(file, pickle.HIGHEST_PROTOCOL).dump(batch)
        self.content = file.getvalue()

    def __reduce__(self) -> Any:
        return pickle.loads, (self.content,)


class _BatchQueue(AnyQueue):
    """A queue of batches, with room for many of them in its pipe."""

    def __init__(self, context: ForkContext):
        super().__init__(ctx=context)
        with contextlib.suppress(OSError):  # the limit of this user is reached
            fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined]

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item into the queue."""
        super().put(_PickledBatch(item), block, timeout)


class ForkedReaders(ForkContext):
    """The context `multiprocessing.get_context("fork")`, with processes that are checked to have started.

    Its first queue is that of torch's DataLoader for batches.
    """

    Process = _Reader

    def __init__(self) -> None:
        super().__init__()
        self._has_queue = False

    def Queue(self, maxsize: int = 0) -> AnyQueue:
        """Return a queue."""
        if self._has_queue:
            return super().Queue(maxsize)
        self._has_queue = True
        return _BatchQueue(self)


def survive_one_signal(worker: int) -> None:
    """Ignore the first signal that stops a training.

    The signal goes to the whole process group, and the rank still needs its workers to stop in order.
    """

    def ignore_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, ignore_once)

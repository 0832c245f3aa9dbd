"""The queue in which worker processes pass batches to their rank."""

import contextlib
import fcntl
import io
import pickle
from multiprocessing.context import ForkContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.batch_memory import BatchMemory, load, store_bytes
from paceline.data.workers import ForkedReaders

if TYPE_CHECKING:
    AnyQueue = Queue[Any]
else:
    AnyQueue = Queue  # Python 3.11: not generic

PIPE_BYTES = 2**20  # of the queue: what any user may request
MAX_COPIED_BYTES = 2**16  # of a tensor; larger ones are passed in shared memory


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

    def __init__(self, batch: Any, memory: BatchMemory | None):
        file = io.BytesIO()
        stored, self.place = store_bytes(batch, memory)
        BatchPickler(file, pickle.HIGHEST_PROTOCOL).dump(stored)
        self.content = file.getvalue()

    def __reduce__(self) -> Any:
        return load, (self.content, self.place)


class _BatchQueue(AnyQueue):
    """A queue of batches, with room for many of them in its pipe, and in memory for the bytes of samples."""

    def __init__(self, context: ForkContext, memory: BatchMemory | None):
        super().__init__(ctx=context)
        self._memory = memory
        with contextlib.suppress(OSError):  # the limit of this user is reached
            fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined]

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item into the queue."""
        super().put(_PickledBatch(item, self._memory), block, timeout)


class BatchReaders(ForkedReaders):
    """The context of torch's DataLoader, whose first queue is that for batches.

    prefetch: number of batches that each worker reads ahead.
    """

    def __init__(self, workers: int, prefetch: int) -> None:
        super().__init__()
        self._has_queue = False
        self._memory = BatchMemory.open(workers, prefetch + 1)

    def Queue(self, maxsize: int = 0) -> AnyQueue:
        """Return a queue."""
        if self._has_queue:
            return super().Queue(maxsize)
        self._has_queue = True
        return _BatchQueue(self, self._memory)

"""Random changes to training samples by `Task.transform`, and to batches by `Task.batch_transform`."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from paceline.batch import cast_floats, count_samples, find_tensors
from paceline.distributed.rng import derive_seed, rng_states
from paceline.errors import TaskError
from paceline.sample_rng import SampleRng
from paceline.task import Task
from paceline.user_code import UserCode

Batch = Any
Part = tuple[list[int], list[int]]  # numbers and indices of the samples of a batch


class Augmentation:
    """The random changes that a task makes to its training samples.

    Their random numbers belong to the numbers of the samples. So they do not depend on ranks, workers or
    micro-batches, and a resumed run repeats them.

    seed: of the spec. floats: the dtype of floating-point tensors; None: as they are.
    divided_by: the plan that divides batches, if any. Random numbers that do not come from `rng` are then an
    error in `batch_transform`: they would depend on the plan.
    """

    def __init__(self, task: Task, seed: int, floats: torch.dtype | None, divided_by: str | None = None):
        self._task, self._floats, self._divided_by = task, floats, divided_by
        self._seed = derive_seed(seed, "rng", "train")
        self.changes_samples = type(task).transform is not Task.transform
        self.changes_batches = type(task).batch_transform is not Task.batch_transform

    def change_sample(self, sample: Any, number: int) -> Any:
        """Return what the task makes of one sample. Exceptions of the task are not converted."""
        if not self.changes_samples:
            return sample
        return self._task.transform(sample, self._open_rng([number], "transform", torch.device("cpu")))

    def change_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return what the task makes of the batch with these samples. Raises TaskError."""
        if not self.changes_batches:
            return batch
        device = next((tensor.device for tensor in find_tensors(batch)), torch.device("cpu"))
        rng = self._open_rng(numbers, "batch_transform", device)
        count, before = count_samples(batch), rng_states() if self._divided_by is not None else ()
        with UserCode("batch_transform()", self._task.batch_transform), torch.no_grad():
            batch = self._task.batch_transform(batch, rng)
        if self._divided_by is not None and rng_states() != before:
            raise TaskError(
                "batch_transform() draws random numbers that do not come from rng, which would differ when"
                f" plan {self._divided_by} divides the batch; draw from rng, or call the library by"
                " paceline.data.transforms.by_sample"
            )
        if batch is None:
            raise TaskError("batch_transform() returned None; it must return the batch")
        if (found := count_samples(batch)) != count:
            raise TaskError(
                f"batch_transform() returned {found} samples for a batch of {count}; return {count}"
            )
        return cast_floats(batch, self._floats) if self._floats is not None else batch

    def _open_rng(self, numbers: Sequence[int], name: str, device: torch.device) -> SampleRng:
        return SampleRng(numbers, self._seed, device=device, dtype=self._floats or torch.float32, name=name)


class NumberRecorder:
    """An iterable of the parts of a loader that keeps the numbers of those parts whose batch is not here yet.

    A loader reads parts ahead of the batches that it returns.
    """

    def __init__(self, parts: Iterable[Part]):
        self._parts, self._pending = parts, deque[list[int]]()

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            self._pending.append(part[0])
            yield part

    def pop(self) -> list[int]:
        """Return the numbers of the next batch."""
        return self._pending.popleft()

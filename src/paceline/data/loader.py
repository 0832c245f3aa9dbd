"""The samples of each step. Their order is a pure function of (seed, epoch, position); the state is one integer.

The samples of a training are numbered 0, 1, 2, … over all epochs. Step s consumes the numbers from s·batch on, whatever the ranks;
they are split into micro-batches, and each of these into one contiguous part a rank.
"""

import itertools
import math
import traceback
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

from paceline.data.workers import Forked, survive_one_signal
from paceline.distributed.rng import (
    FIXED_SEED,
    derive_seed,
    has_rng_moved,
    rng_states,
    seed_cpu_rngs,
    watch_rng_state,
)
from paceline.errors import DataError
from paceline.task import MapDataset, Task
from paceline.user_code import UserCode, describe_exception, is_passed_through

Batch = Any
Numbers = npt.NDArray[Any]  # of samples
ROUNDS = 8
CHUNK = 8192  # numbers shuffled at a time
MOST_EPOCHS = 100  # that one batch may hold
TRIED = 8  # samples of the first batch that show whether samples draw
DONE = object()
NOT_STACKED = (
    "; samples are stacked by torch's default_collate: where their shapes or types differ, give the dataset a method batch_of(indices) "
    "that returns the batch collated, padded for example"
)


def shuffled(numbers: Numbers, samples: int, seed: int) -> Numbers:
    """Indices of the samples with these numbers (int64, any shape (n,)), when an epoch has `samples`.

    Each epoch is a permutation of its own: a Feistel network over a·b ≥ samples, walked on until it lands below `samples`
    (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). It takes no memory, any number can be asked for
    alone, and no library can change the order from one release to the next.
    """
    epochs, positions = np.divmod(numbers.astype(np.int64), samples)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permute(
            positions[here].astype(np.uint64), samples, derive_seed(seed, "order", epoch)
        )
    return indices


def _permute(positions: Numbers, samples: int, key: int) -> Numbers:
    root = max(1, math.isqrt(samples - 1) + 1)
    a, b = np.uint64(root), np.uint64(-(-samples // root))
    out: Numbers = positions.copy()
    walking = np.ones(len(positions), dtype=bool)
    while walking.any():
        left: Numbers = out[walking] // b
        right: Numbers = out[walking] % b
        for turn in range(0, ROUNDS, 2):
            left = (left + _mix(right, key + turn) % a) % a
            right = (right + _mix(left, key + turn + 1) % b) % b
        out[walking] = left * b + right
        walking[walking] = out[walking] >= samples
    return out.astype(np.int64)


def _mix(values: Numbers, key: int) -> Numbers:
    """splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    z = values + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class RankBatchSlice:
    """What one rank has of the samples: micro-batch m of a step begins at step·batch + m·(batch / microbatches).

    The parts of the ranks differ by one sample at the most; all plans but uneven ones and a parameter server want them equal."""

    batch: int
    microbatches: int
    rank: int
    ranks: int

    @property
    def share(self) -> int:
        """Samples of a micro-batch on this rank."""
        return self._begin(self.rank + 1) - self._begin(self.rank)

    def _begin(self, rank: int) -> int:
        return self.batch // self.microbatches * rank // self.ranks

    def numbers(self, step: int) -> Numbers:
        """Numbers of the samples of a step on this rank, shape (microbatches, share)."""
        first = step * self.batch + self._begin(self.rank)
        return (
            first
            + np.arange(self.microbatches)[:, None] * (self.batch // self.microbatches)
            + np.arange(self.share)[None, :]
        )


def training_parts(
    part: RankBatchSlice, samples: int, seed: int, first_step: int, steps: int
) -> Iterator[tuple[list[int], list[int]]]:
    """(numbers, indices) of every micro-batch of this rank from `first_step` until `steps`."""
    at_once = max(1, CHUNK // (part.microbatches * part.share))
    for begin in range(first_step, steps, at_once):
        numbers = np.stack([part.numbers(step) for step in range(begin, min(begin + at_once, steps))])
        indices = shuffled(numbers.ravel(), samples, seed).reshape(numbers.shape)
        for of_step, their_indices in zip(numbers.tolist(), indices.tolist(), strict=True):
            yield from zip(of_step, their_indices, strict=True)


def validation_parts(samples: int, batch: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Indices of the samples of this rank, each sample on one rank. All ranks get equally many parts, some of them empty."""
    share = -(-batch // ranks)
    for begin in range(0, samples, share * ranks):
        yield list(range(min(begin + rank * share, samples), min(begin + (rank + 1) * share, samples)))


@dataclass(frozen=True)
class FailedSample:
    """Instead of a batch: the sample that could not be read. (An exception would come out of a worker with another message.)"""

    message: str
    details: str


class Samples:
    """A dataset under the hands of torch's DataLoader: a part in, a collated batch out.

    Random augmentation belongs to the sample, not to the rank or worker that happens to read it: what a sample draws from torch on the
    CPU, numpy and random is a pure function of seed, split and number. To start three streams takes longer than to read a sample from
    memory, so it is done for each sample only where samples draw. The first batch shows whether they do. A later batch that draws, the
    first of a dataset that draws rarely, is read again.
    """

    def __init__(self, dataset: MapDataset, split: str, seed: int, floats: torch.dtype | None):
        self.dataset = dataset
        self.count = _length(dataset, split)
        self.split = split
        self.seed = seed
        self.floats = floats
        self._draws: bool | None = None  # whether samples draw; None: nothing was read yet
        self._reading: int | list[int] = []  # the index that is read, or those that are

    def __getitem__(self, part: tuple[list[int], list[int]]) -> Batch | FailedSample:
        numbers, indices = part
        self._reading = indices
        try:
            if hasattr(self.dataset, "batch_of"):
                self._start_streams(numbers[0])
                batch = self.dataset.batch_of(indices)
            else:
                batch = self._one_by_one(numbers, indices)
        except (
            BaseException
        ) as error:  # the user's code; it is raised again, as a DataError, where the batch is used
            if isinstance(error, KeyboardInterrupt) and is_passed_through(error):
                raise
            at = self._reading
            what = (
                f"sample {at} of {self.split!r}"
                if isinstance(at, int)
                else f"one of the samples {at} of {self.split!r}"
            )
            hint = NOT_STACKED if isinstance(at, list) and not hasattr(self.dataset, "batch_of") else ""
            return FailedSample(f"{what} raised {describe_exception(error)}{hint}", traceback.format_exc())
        return cast_floats(batch, self.floats) if self.floats is not None else batch

    def _one_by_one(self, numbers: list[int], indices: list[int]) -> Batch:
        if self._draws is False:
            seed_cpu_rngs(FIXED_SEED)
            with watch_rng_state() as has_asked:
                try:
                    batch, error = self._collated([self._sample(index) for index in indices], indices), None
                except (Exception, SystemExit) as raised:  # what a sample drew may be why
                    batch, error = None, raised
            if not has_asked() and not has_rng_moved():
                if error is not None:
                    raise error
                self._start_streams(
                    numbers[-1]
                )  # what runs between batches finds the streams as if each sample had started them
                return batch
            self._draws = True
        found = []
        for at, (number, index) in enumerate(zip(numbers, indices, strict=True)):
            self._start_streams(number)
            found.append(
                self._sample(index) if self._draws is not None or at >= TRIED else self._tried(index)
            )
        self._draws = bool(self._draws)
        return self._collated(found, indices)

    def _sample(self, index: int) -> Any:
        self._reading = index
        return self.dataset[index]

    def _tried(self, index: int) -> Any:
        before = rng_states()
        with watch_rng_state() as has_asked:
            sample = self._sample(index)
        if has_asked() or rng_states() != before:
            self._draws = True
        return sample

    def _collated(self, samples: list[Any], indices: list[int]) -> Batch:
        self._reading = indices
        return default_collate(samples)

    def _start_streams(self, number: int) -> None:
        seed_cpu_rngs(derive_seed(self.seed, self.split, number))


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    return tree_map(
        lambda item: item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item, batch
    )


def open_dataset(task: Task, split: str) -> MapDataset | None:
    """The dataset of a split, checked. Raises DataError."""
    with UserCode(f"dataset({split!r})", task.dataset, DataError):
        dataset = task.dataset(split)
    if dataset is None:
        if split == "train":
            raise DataError(
                f"{type(task).__name__}.dataset('train') returned None; it must return the training samples"
            )
        return None
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{type(task).__name__}.dataset({split!r}) must have len() and [i], got {type(dataset).__name__}"
        )
    if _length(dataset, split) == 0:
        raise DataError(f"{type(task).__name__}.dataset({split!r}) is empty")
    return dataset


def check_batch(batch: int, samples: int) -> None:
    """Raise DataError for a batch that is a mistake: reading it would fill the memory."""
    if batch > MOST_EPOCHS * samples:
        raise DataError(
            f"batch {batch:,} is more than {MOST_EPOCHS} times the {samples:,} training samples; use at most --batch {samples}"
        )


def _length(dataset: MapDataset, split: str) -> int:
    with UserCode(f"the length of dataset({split!r})", getattr(type(dataset), "__len__", None), DataError):
        return len(dataset)


def batches(
    samples: Samples,
    parts: Iterable[tuple[list[int], list[int]]],
    device: torch.device,
    workers: int,
    prefetch: int,
) -> Generator[Batch]:
    """The batches of `parts` on `device`, read ahead. Raises DataError for a sample that cannot be read."""
    if not workers and device.type != "cuda":
        yield from _checked(map(samples.__getitem__, parts))
        return
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # all that the loader asks of it is []
        batch_size=None,
        sampler=parts,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=survive_one_signal,
        multiprocessing_context=Forked() if workers else None,
    )
    if device.type == "cuda":
        yield from _moved(_checked(loader), device)
    else:
        yield from _checked(loader)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _checked(loader: Iterable[Batch | FailedSample]) -> Iterator[Batch]:
    found = iter(loader)
    reading = UserCode(
        "reading samples", raises=DataError, hint="with --workers 0 each rank reads for itself"
    )
    while True:
        with reading:
            batch = next(found, DONE)
        if batch is DONE:
            return
        if isinstance(batch, FailedSample):
            raise DataError(batch.message) from DataError(batch.details)
        yield batch


def _moved(loader: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copy from pinned memory on a stream of its own, one batch ahead, so that the copy runs under the step before."""
    stream = torch.cuda.Stream(device)

    def start_copy(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            return tree_map(
                lambda item: item.to(device, non_blocking=True) if isinstance(item, Tensor) else item, batch
            )

    def finish_copy(batch: Batch) -> Batch:
        here = torch.cuda.current_stream(device)
        here.wait_stream(stream)
        tree_map(lambda item: item.record_stream(here) if isinstance(item, Tensor) else item, batch)
        return batch

    ahead = [start_copy(batch) for batch in itertools.islice(loader, 1)]
    while ahead:
        ready = finish_copy(ahead.pop())
        ahead += [start_copy(batch) for batch in itertools.islice(loader, 1)]
        yield ready

"""Samples: the samples of a split as batches, with random numbers that belong to each sample."""

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from paceline.batch import cast_floats
from paceline.data.augment import Augmentation
from paceline.data.ragged import pad_each
from paceline.distributed.rng import (
    FIXED_SEED,
    derive_seed,
    has_rng_moved,
    rng_states,
    seed_cpu_rngs,
    watch_rng_state,
)
from paceline.errors import DataError
from paceline.sample_rng import SampleNumbers
from paceline.task import MapDataset
from paceline.user_code import UserCode, describe_exception, is_passed_through

Batch = Any
NUM_PROBED = 8  # samples of the first batch that show whether samples draw random numbers
NOT_STACKED = (
    "; torch's default_collate stacks the samples: if their shapes or types differ, define collate(samples)"
    " in the task, which returns the batch, for example padded"
)


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read, in place of a batch: a worker changes the message of an exception.

    message  the sentence for the user
    details  the traceback
    """

    message: str
    details: str


class RepairedBatch(NamedTuple):
    """A batch with other samples in place of those that cannot be read, and the sentences about these."""

    batch: Any
    unreadable: dict[int, str]  # by index


class Samples:
    """A dataset for torch's DataLoader, which maps (numbers, indices) of a micro-batch to the collated batch.

    Random augmentation depends on the sample, not on the rank or worker that reads it: the random numbers
    that a sample draws from torch on the CPU, numpy and random are a pure function of seed, split and
    number. Seeding three generators takes longer than reading a sample from memory, so each sample is
    seeded only if samples draw. The first batch shows whether they do. If a later batch draws for the first
    time, it is read again.

    collate: makes a batch of a list of samples; None: torch's default_collate.
    divided_by: the plan that divides batches, if any. Random numbers in `collate` are then an error: they
    would depend on the plan.
    augmentation: what the task changes at random; None: nothing.
    skip_corrupt: number of samples that may raise DataError. The next in the dataset are used instead, which
    depends on no rank or worker.
    """

    def __init__(
        self,
        dataset: MapDataset,
        split: str,
        seed: int,
        floats: torch.dtype | None,
        collate: Callable[[list[Any]], Batch] | None = None,
        divided_by: str | None = None,
        augmentation: Augmentation | None = None,
        skip_corrupt: int = 0,
    ):
        self.dataset = dataset
        self.source: Any = dataset  # which gives [i]: the dataset, or a cache of it
        self.count = _length(dataset, split)
        self.split = split
        self.seed = seed
        self.floats = floats
        self.collate = collate
        self.divided_by = divided_by
        self.augmentation = augmentation
        self.skip_corrupt = skip_corrupt
        self.unreadable: dict[int, str] = {}  # sentences by index, of all batches that this process received
        self._unreadable_of_batch: dict[int, str] = {}
        self._reads_many = _reads_many(type(dataset))
        self._draws: bool | None = None  # whether samples draw random numbers; None: not known yet
        self._reading: int | list[int] = []  # the index or indices that are being read
        self._is_collating = False

    def __getitem__(self, part: tuple[list[int], list[int]]) -> Batch | FailedSample | RepairedBatch:
        numbers, indices = part
        self._reading, self._is_collating = indices, False
        self._unreadable_of_batch = {}
        try:
            if hasattr(self.dataset, "batch_of"):
                self._seed(numbers[0])
                batch = self.dataset.batch_of(indices)
            else:
                batch = self._read_samples(numbers, indices)
        except BaseException as error:  # of the user's code; raised as a DataError when the batch is used
            if isinstance(error, KeyboardInterrupt) and is_passed_through(error):
                raise
            return FailedSample(self._describe_failure(error), traceback.format_exc())
        if self.collate is not None:
            batch = pad_each(batch)
        batch = cast_floats(batch, self.floats) if self.floats is not None else batch
        if self._unreadable_of_batch and not isinstance(batch, FailedSample):
            return RepairedBatch(batch, self._unreadable_of_batch)
        return batch

    def receive(self, batch: Batch | RepairedBatch) -> Batch:
        """Return the batch, and keep which samples cannot be read. Raises DataError if they are too many."""
        if not isinstance(batch, RepairedBatch):
            return batch
        self.unreadable |= batch.unreadable
        if len(self.unreadable) > self.skip_corrupt:
            raise DataError(
                f"{len(self.unreadable)} samples cannot be read, more than"
                f" data.skip_corrupt={self.skip_corrupt}; the last: {list(batch.unreadable.values())[-1]}"
            )
        return batch.batch

    def _describe_failure(self, error: BaseException) -> str:
        reading = self._reading
        if isinstance(reading, int):
            return f"sample {reading} of {self.split!r} raised {describe_exception(error)}"
        if self._is_collating and self.collate is not None:
            what = f"collate() of the samples {reading} of {self.split!r}"
            return f"{what} raised {describe_exception(error, self.collate)}"
        hint = NOT_STACKED if self._is_collating else ""
        return f"one of the samples {reading} of {self.split!r} raised {describe_exception(error)}{hint}"

    def _read_samples(self, numbers: list[int], indices: list[int]) -> Batch:
        """Return the collated samples. Each sample is seeded with its number, if samples draw."""
        if self._draws is False:
            seed_cpu_rngs(FIXED_SEED)
            with watch_rng_state() as was_state_read:
                try:
                    samples = self._read_many(numbers, indices)
                    error = None
                except (Exception, SystemExit) as raised:  # the cause may be a random number
                    samples, error = [], raised
            if not was_state_read() and not has_rng_moved():
                if error is not None:
                    raise error
                # Code that runs between batches must find the generators as if each sample had been seeded.
                self._seed(numbers[-1])
                return self.collate_samples(samples, numbers, indices)
            self._draws = True
        samples = []
        for position, (number, index) in enumerate(zip(numbers, indices, strict=True)):
            self._seed(number)
            is_known = self._draws is not None or position >= NUM_PROBED
            read = self._read if is_known else self._probe
            samples.append(read(number, index))
        self._draws = bool(self._draws)
        return self.collate_samples(samples, numbers, indices)

    def _read_many(self, numbers: list[int], indices: list[int]) -> list[Any]:
        """Return samples together, if the dataset can read them so; an error is that of the sample alone."""
        if self._reads_many and not self.skip_corrupt and self.source is self.dataset:
            with contextlib.suppress(Exception):
                samples: list[Any] = self.dataset.read_many(indices)
                if self.augmentation is None or not self.augmentation.changes_samples:
                    return samples
                change = self.augmentation.change_sample
                return [change(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        return [self._read(*place) for place in zip(numbers, indices, strict=True)]

    def _read(self, number: int, index: int) -> Any:
        self._reading = index
        sample = self._read_or_replace(index) if self.skip_corrupt else self.source[index]
        return sample if self.augmentation is None else self.augmentation.change_sample(sample, number)

    def _read_or_replace(self, index: int) -> Any:
        """Return the sample, or else the next that can be read."""
        for offset in range(min(self.skip_corrupt, self.count - 1)):
            at = (index + offset) % self.count
            try:
                return self.source[at]
            except DataError as error:
                self._unreadable_of_batch[at] = str(error)
        self._reading = (index + min(self.skip_corrupt, self.count - 1)) % self.count
        return self.source[self._reading]

    def _probe(self, number: int, index: int) -> Any:
        """Return a sample, and note in `_draws` if it draws random numbers."""
        before = rng_states()
        with watch_rng_state() as was_state_read:
            sample = self._read(number, index)
        if was_state_read() or rng_states() != before:
            self._draws = True
        return sample

    def collate_samples(
        self, samples: list[Any], numbers: list[int], indices: list[int]
    ) -> Batch | FailedSample:
        """Return the batch of samples that were read."""
        self._reading, self._is_collating = indices, True
        if self.collate is None:
            return default_collate(samples)
        # Not called twice to find out whether it draws: a collate function may change its samples.
        seed = derive_seed(self.seed, self.split, "collate", numbers[0])
        seed_cpu_rngs(FIXED_SEED if self.divided_by is not None else seed)
        with watch_rng_state() as was_state_read:
            batch = self.collate(samples)
        what = f"collate() of the samples {indices} of {self.split!r}"
        if self.divided_by is not None:
            if was_state_read() or has_rng_moved():
                return FailedSample(
                    f"{what} draws random numbers, which would differ when plan {self.divided_by} divides the"
                    " batch; draw in [i] of the dataset, where each sample has its own random numbers, or use"
                    " a plan that does not divide the batch (dp=1 and one micro-batch)",
                    "",
                )
            seed_cpu_rngs(seed)
        if batch is None:
            return FailedSample(f"{what} returned None; it must return the batch", "")
        return batch

    def _seed(self, number: int) -> None:
        seed_cpu_rngs(derive_seed(self.seed, self.split, number))


def _reads_many(kind: type) -> bool:
    """Return whether a class has `read_many` for its own `[i]`, which no subclass has replaced."""
    owner = next((each for each in kind.__mro__ if {"read_many", "__getitem__"} & vars(each).keys()), None)
    return owner is not None and {"read_many", "__getitem__"} <= vars(owner).keys()


def number_batch(seed: int, split: str, numbers: Sequence[int], floats: torch.dtype | None) -> SampleNumbers:
    """Return what the random numbers of `rng` depend on, for a batch with these samples of a split.

    seed: of the spec. floats: the dtype that `Samples` casts to.
    """
    return SampleNumbers(numbers, derive_seed(seed, "rng", split), floats or torch.float32)


def _length(dataset: MapDataset, split: str) -> int:
    with UserCode(f"the length of dataset({split!r})", getattr(type(dataset), "__len__", None), DataError):
        return len(dataset)

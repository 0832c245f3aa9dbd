"""The samples of each step. Their order is a pure function of the seed and the number of the sample.

The state is one integer. The samples of a training are numbered 0, 1, 2, … over all epochs. Step s consumes
the numbers s·batch to (s+1)·batch - 1, for any number of ranks. They are divided into micro-batches, and
each micro-batch into one contiguous slice per rank.
"""

import contextlib
import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from paceline.batch import cast_floats, find_tensors, move
from paceline.data.augment import Augmentation, NumberRecorder
from paceline.data.batch_queue import BatchReaders
from paceline.data.mixture import Mixture
from paceline.data.order import Numbers, Order, SampleOrder
from paceline.data.ragged import Agree, pad_each, pad_together
from paceline.data.stream import Stream
from paceline.data.workers import survive_one_signal
from paceline.distributed.rng import (
    FIXED_SEED,
    derive_seed,
    has_rng_moved,
    rng_states,
    seed_cpu_rngs,
    watch_rng_state,
)
from paceline.errors import DataError, TaskError
from paceline.plan.plan import ResolvedPlan
from paceline.sample_rng import SampleNumbers
from paceline.spec import Spec, StepBatches
from paceline.task import MapDataset, Task
from paceline.user_code import UserCode, describe_exception, is_passed_through

Batch = Any
CHUNK = 8192  # sample numbers whose order is computed at a time
MAX_EPOCHS_PER_BATCH = 100
NUM_PROBED = 8  # samples of the first batch that show whether samples draw random numbers
DONE = object()
NOT_STACKED = (
    "; torch's default_collate stacks the samples: if their shapes or types differ, define collate(samples)"
    " in the task, which returns the batch, for example padded"
)


@dataclass(frozen=True)
class RankBatchSlice:
    """The samples that one rank consumes.

    Micro-batch m of a step begins at step·batch + m·(batch / microbatches).

    The slices of the ranks differ by one sample at most. Only uneven plans and a parameter server allow
    different slices.

    batch         samples of the global batch
    microbatches  number of micro-batches per step
    rank          data rank, counted from 0
    ranks         number of data ranks
    batches       the batch of each step, if it changes
    """

    batch: int
    microbatches: int
    rank: int
    ranks: int
    batches: StepBatches | None = None

    @property
    def share(self) -> int:
        """The number of samples of a micro-batch on this rank, in steps with the whole batch."""
        return self._begin(self.rank + 1) - self._begin(self.rank)

    def of_step(self, step: int) -> "RankBatchSlice":
        """Return the slice with the batch of a step."""
        return self if self.batches is None else replace(self, batch=self.batches.batch_of(step))

    def next_change(self, step: int) -> int | None:
        """Return the first step after `step` that has another batch, or None."""
        return self.batches.next_change(step) if self.batches is not None else None

    def _begin(self, rank: int) -> int:
        return self.batch // self.microbatches * rank // self.ranks

    def numbers(self, step: int) -> Numbers:
        """Return the numbers of the samples of a step on this rank, of shape (microbatches, share)."""
        own = self.of_step(step)
        before = step * self.batch if self.batches is None else self.batches.samples_before(step)
        return (
            before
            + own._begin(self.rank)
            + np.arange(self.microbatches)[:, None] * (own.batch // self.microbatches)
            + np.arange(own.share)[None, :]
        )


def training_parts(
    part: RankBatchSlice, order: Order, first_step: int, steps: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (numbers, indices) of each micro-batch of this rank, from step `first_step` until `steps`."""
    steps_per_chunk = max(1, CHUNK // (part.microbatches * part.share))
    begin = end = first_step
    while begin < steps:
        end = min(begin + steps_per_chunk, steps, part.next_change(begin) or steps)
        numbers = np.stack([part.numbers(step) for step in range(begin, end)])
        begin = end
        indices = order.indices(numbers.ravel()).reshape(numbers.shape)
        for step_numbers, step_indices in zip(numbers.tolist(), indices.tolist(), strict=True):
            yield from zip(step_numbers, step_indices, strict=True)


def validation_parts(samples: int, batch: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Yield the indices of the samples of each batch on this rank; each sample is on one rank.

    All ranks have the same number of batches, some of which may be empty.
    """
    share = -(-batch // ranks)
    for begin in range(0, samples, batch):
        end = min(begin + batch, samples)
        yield list(range(min(begin + rank * share, end), min(begin + (rank + 1) * share, end)))


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


def open_dataset(task: Task, split: str) -> MapDataset | None:
    """Return the dataset of a split, or None if the task has no validation samples. Raises DataError."""
    with UserCode(f"dataset({split!r})", task.dataset, DataError):
        dataset = task.dataset(split)
    if dataset is None:
        if split == "train":
            raise DataError(
                f"{type(task).__name__}.dataset('train') returned None; it must return the training samples"
            )
        return None
    _check_dataset(dataset, f"{type(task).__name__}.dataset({split!r})", split)
    return dataset


def _check_dataset(dataset: Any, what: str, split: str) -> None:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        hint = "; wrap it in a Stream" if hasattr(dataset, "__iter__") else ""
        raise DataError(f"{what} must have len() and [i], got {type(dataset).__name__}{hint}")
    if _length(dataset, split) == 0:
        raise DataError(f"{what} is empty")


def open_samples(task: Task, split: str, spec: Spec, plan: ResolvedPlan | None = None) -> Samples | None:
    """Return the samples of a split, or None if the task has no validation samples. Raises DataError.

    plan: what divides the batches, if it is known.
    """
    dataset = open_dataset(task, split)
    return None if dataset is None else _make_samples(task, dataset, split, spec, plan)


def open_file_samples(task: Task, files: Sequence[Path], spec: Spec, plan: ResolvedPlan) -> Samples:
    """Return the samples of files, through the task's `read_files`. Raises DataError and TaskError."""
    kind = type(task)
    if kind.read_files is Task.read_files:
        raise TaskError(
            f"{kind.__name__} reads no files, because it has no method read_files(files); define it, "
            "or use --split"
        )
    for file in files:
        if not file.is_file():
            raise DataError(f"no such file: {file}")
    with UserCode("read_files()", task.read_files, DataError):
        dataset = task.read_files(files)
    _check_dataset(dataset, f"{kind.__name__}.read_files()", "the files")
    return _make_samples(task, dataset, "files", spec, plan)


def _make_samples(
    task: Task,
    dataset: MapDataset,
    split: str,
    spec: Spec,
    plan: ResolvedPlan | None,
    is_training: bool = False,
) -> Samples:
    has_collate = type(task).collate is not Task.collate and not getattr(dataset, "replaces_collate", False)
    if has_collate and hasattr(dataset, "batch_of"):
        raise DataError(
            f"{type(task).__name__}.collate() would not be called, because dataset({split!r}) has"
            " batch_of(indices), which returns whole batches; remove collate or batch_of"
        )
    is_divided = plan is not None and plan.dp * plan.microbatches > 1
    floats = torch.float64 if spec.precision == "fp64" else None
    divided_by = str(plan) if is_divided else None
    augmentation = Augmentation(task, spec.seed, floats, divided_by) if is_training else None
    if augmentation is not None and augmentation.changes_samples and hasattr(dataset, "batch_of"):
        raise DataError(
            f"{type(task).__name__}.transform() would not be called, because dataset({split!r}) has"
            " batch_of(indices), which returns whole batches; define batch_transform(batch, rng) instead"
        )
    return Samples(
        dataset,
        split,
        spec.seed,
        floats,
        task.collate if has_collate else None,
        divided_by,
        augmentation,
        spec.data.skip_corrupt if is_training else 0,
    )


def open_training_samples(task: Task, spec: Spec, plan: ResolvedPlan | None = None) -> Samples:
    """Return the samples of the training split, as `open_samples` does, with the changes of the task."""
    dataset = open_dataset(task, "train")
    assert dataset is not None
    return _make_samples(task, dataset, "train", spec, plan, is_training=True)


def find_streams(dataset: MapDataset) -> list[Stream]:
    """Return the streams that a dataset consists of."""
    sources = dataset.sources if isinstance(dataset, Mixture) else [dataset]
    return [source for source in sources if isinstance(source, Stream)]


def describe_streams(samples: Samples, first: int) -> tuple[str, ...]:
    """Return a note on what reading streams costs, if there are any. first: sample of the training."""
    if not find_streams(samples.dataset):
        return ()
    skipped = f"; it begins with skipping the samples before number {first:,}" if first else ""
    return (
        "the training samples are a stream: each process that reads goes through all of it, and decodes its"
        f" own samples{skipped}",
    )


def choose_order(samples: Samples, spec: Spec) -> Order:
    """Return the order in which a training reads samples."""
    if find_streams(samples.dataset) and spec.data.shuffle != "none":
        raise DataError(
            f"a Stream is read in its own order, got data.shuffle={spec.data.shuffle!r}; use --set"
            " data.shuffle=none, and shuffle in the iterator"
        )
    if isinstance(samples.dataset, Mixture):
        return samples.dataset.make_order(spec.seed, spec.data)
    if spec.data.weights:
        raise DataError(f"data.weights requires a Mixture, got {type(samples.dataset).__name__}; remove them")
    return SampleOrder(samples.count, spec.seed, spec.data.shuffle, spec.data.window)


def check_batch(batch: int, samples: int) -> None:
    """Raise DataError for a batch so large that it must be a mistake: reading it would fill the memory."""
    if batch > MAX_EPOCHS_PER_BATCH * samples:
        raise DataError(
            f"batch {batch:,} is more than {MAX_EPOCHS_PER_BATCH} times the {samples:,} training samples;"
            f" use at most --batch {samples}"
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
    together: int = 1,
    agree: Agree = list,
) -> Generator[Batch]:
    """Yield the batches of `parts` on `device`, read ahead. Raises DataError if a sample cannot be read.

    parts: (numbers, indices) of each batch, as `training_parts` yields them.
    workers: number of processes that read; 0: this process reads.
    prefetch: number of batches that each worker reads ahead.
    together: number of batches in a row that are padded to the same shapes.
    agree: a collective that lets ranks agree on these shapes.
    """
    augmentation = samples.augmentation
    if augmentation is None or not augmentation.changes_batches:
        yield from _padded_batches(samples, parts, device, workers, prefetch, together, agree)
        return
    recorder = NumberRecorder(parts)
    with contextlib.closing(
        _padded_batches(samples, recorder, device, workers, prefetch, together, agree)
    ) as source:
        for batch in source:
            yield augmentation.change_batch(batch, recorder.pop())


def _padded_batches(
    samples: Samples,
    parts: Iterable[tuple[list[int], list[int]]],
    device: torch.device,
    workers: int,
    prefetch: int,
    together: int,
    agree: Agree,
) -> Generator[Batch]:
    source = _read_batches(samples, parts, device, workers, prefetch)
    if samples.collate is None:
        yield from source
        return
    with contextlib.closing(source):
        while few := list(itertools.islice(source, together)):
            yield from pad_together(few, agree)


def _read_batches(
    samples: Samples,
    parts: Iterable[tuple[list[int], list[int]]],
    device: torch.device,
    workers: int,
    prefetch: int,
) -> Generator[Batch]:
    if not workers and device.type != "cuda":
        yield from _check(map(samples.__getitem__, parts), samples)
        return
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # the loader uses only its []
        batch_size=None,
        sampler=parts,
        collate_fn=_identity,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=survive_one_signal,
        multiprocessing_context=BatchReaders(workers, prefetch) if workers else None,
    )
    if device.type == "cuda":
        yield from _copy_to(_check(loader, samples), device)
    else:
        yield from _check(loader, samples)


def _identity(batch: Batch) -> Batch:
    return batch


def _check(loader: Iterable[Batch | FailedSample | RepairedBatch], samples: Samples) -> Iterator[Batch]:
    """Yield the batches. Raises DataError for a sample that failed."""
    iterator = iter(loader)
    reading = UserCode(
        "reading samples", raises=DataError, hint="to read without worker processes, use --workers 0"
    )
    try:
        while True:
            with reading:
                batch = next(iterator, DONE)
            if batch is DONE:
                return
            if isinstance(batch, FailedSample):
                raise DataError(batch.message) from DataError(batch.details)
            yield samples.receive(batch)
    finally:
        del iterator  # ends the workers: the traceback of an error would keep the iterator, and them, alive


def _copy_to(loader: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on a GPU. They are copied from pinned memory on a separate stream, one batch ahead.

    The copy of a batch overlaps with the step before it.
    """
    stream = torch.cuda.Stream(device)

    def start_copy(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            return move(batch, device, non_blocking=True)

    def finish_copy(batch: Batch) -> Batch:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in find_tensors(batch):
            tensor.record_stream(current)
        return batch

    ahead = [start_copy(batch) for batch in itertools.islice(loader, 1)]
    while ahead:
        ready = finish_copy(ahead.pop())
        ahead += [start_copy(batch) for batch in itertools.islice(loader, 1)]
        yield ready

"""Batches of samples on the device, read ahead by worker processes."""

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.batch import find_tensors, move
from paceline.data.augment import NumberRecorder
from paceline.data.batch_queue import BatchReaders
from paceline.data.ragged import Agree, pad_together
from paceline.data.samples import Batch, FailedSample, RepairedBatch, Samples
from paceline.data.workers import survive_one_signal
from paceline.errors import DataError
from paceline.user_code import UserCode

DONE = object()


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

"""Open the splits and files of a task, with checks of what it returns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.data.augment import Augmentation
from paceline.data.mixture import Mixture
from paceline.data.order import Order, SampleOrder
from paceline.data.samples import Samples, _length
from paceline.data.stream import Stream
from paceline.errors import DataError, TaskError
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import MapDataset, Task
from paceline.user_code import UserCode

MAX_EPOCHS_PER_BATCH = 100


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

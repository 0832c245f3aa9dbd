"""The samples of a LightningDataModule, for the method `dataset` of a task."""

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.errors import TaskError

LOADERS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
BASE_MODULES = ("lightning.pytorch.core.datamodule", "pytorch_lightning.core.datamodule")
# Methods that Lightning calls with each batch.
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def read_split(data: Any, split: str, collate_fn: Any = default_collate) -> Any:
    """Return the dataset of a split of a LightningDataModule; None if it has no loader for it.

        def dataset(self, split):
            return read_split(PointsModule(), split)

    Calls `setup`, and one of `train_dataloader`, `val_dataloader` and `test_dataloader`. Of the loader only
    the dataset is used: order, batches and workers are those of the request. `prepare_data` is not called,
    because every rank calls this function: run it once before the training.

    collate_fn: that of the loader, if the method `collate` of the task calls it.

    Raises TaskError for a loader whose samples or batches would be others than those of its dataset.
    """
    base = _find_base(type(data))
    name = type(data).__name__
    for hook in BATCH_HOOKS:
        if getattr(type(data), hook) is not getattr(base, hook):
            raise TaskError(f"{name} defines {hook}, which is not called; use batch_transform(batch, rng)")
    method = LOADERS.get(split)
    if method is None or (
        getattr(type(data), method) is getattr(base, method) and method not in vars(data)
    ):  # from_datasets sets the methods of the object
        return None
    data.setup("test" if split == "test" else "fit")
    loader = getattr(data, method)()
    _check_loader(loader, f"{method} of {name}", collate_fn)
    return loader.dataset


def _find_base(kind: type) -> type:
    for parent in kind.__mro__:
        if parent.__name__ == "LightningDataModule" and parent.__module__ in BASE_MODULES:
            return parent
    raise TaskError(f"read_split needs a LightningDataModule, got {kind.__name__}")


def _check_loader(loader: Any, owner: str, collate_fn: Any) -> None:
    """Raise TaskError for a loader of which the dataset alone is not enough."""
    if not isinstance(loader, DataLoader):
        raise TaskError(
            f"{owner} returns {type(loader).__name__}, not a DataLoader; return one loader; evaluate_splits "
            "names further splits"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TaskError(f"{owner} reads a stream, {type(loader.dataset).__name__}; read samples by index")
    if type(loader.batch_sampler) is not BatchSampler:
        raise TaskError(f"{owner} makes its own batches; return samples, and define collate(samples)")
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise TaskError(
            f"{owner} has the sampler {type(loader.sampler).__name__}, which is not used; leave it out, and "
            "see data.weights and data.shuffle (docs/data.md)"
        )
    if loader.collate_fn != collate_fn:
        raise TaskError(
            f"{owner} has a collate_fn, which the task does not call; define collate(samples) of the task, "
            "which calls it, and pass it to read_split(…, collate_fn=…)"
        )

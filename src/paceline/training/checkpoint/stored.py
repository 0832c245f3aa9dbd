"""Tensors of a checkpoint on one process, whatever plan wrote it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from paceline.errors import CheckpointError
from paceline.training.checkpoint.index import Index, read_index
from paceline.training.checkpoint.integrity import verify_files
from paceline.training.checkpoint.load import load_metadata
from paceline.training.checkpoint.metadata import read_tensors
from paceline.training.checkpoint.state import AVERAGES


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose files are undamaged."""

    path: Path
    index: Index
    metadata: Metadata

    def names(self) -> list[str]:
        """Return the names of all tensors in the checkpoint."""
        return list(self.metadata.state_dict_metadata)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors, whole. Raises CheckpointError if a file cannot be read."""
        wanted = {name: torch.empty(self.shape(name), dtype=self.dtype(name)) for name in names}
        read_tensors(self.path, self.metadata, wanted, is_single=True)
        return wanted

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)  # read_metadata refuses all others
        return entry


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Return a checkpoint after a check of its files. Raises CheckpointError if it is damaged."""
    index = read_index(path)
    if wrong := verify_files(path, index):
        raise CheckpointError(f"checkpoint {path} is damaged: {wrong}")
    return StoredCheckpoint(path, index, load_metadata(path, index))


def load_weights(path: Path, averaged: bool = False) -> dict[str, Tensor]:
    """Return the whole weights of a checkpoint, under all their names in the model.

    averaged: the moving average in place of each weight that has one. Raises CheckpointError if the
    checkpoint is damaged or has no averages.
    """
    checkpoint = open_checkpoint(path)
    entries = checkpoint.read(entry for entry in checkpoint.names() if entry.startswith("model/"))
    whole = {entry.removeprefix("model/"): tensor for entry, tensor in entries.items()}
    if averaged:
        names = [entry for entry in checkpoint.names() if entry.startswith(AVERAGES)]
        if not names:
            raise CheckpointError(f"{path} has no moving averages: the task's after_step() has no Ema")
        whole |= {name.removeprefix(AVERAGES): tensor for name, tensor in checkpoint.read(names).items()}
    tied = checkpoint.index.tied
    return whole | {alias: whole[name].clone() for alias, name in tied.items() if name in whole}

"""A task that notes which samples it consumes, and takes its time: what a drill trains in place of the user's, in the ranks."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.drill.training import NUMBER
from paceline.task import Task, field_values

METHODS = ("model", "inputs", "loss", "weights", "metrics", "layout", "optimizer", "pretrained")


class NumberedSample(NamedTuple):
    """A sample or a batch, with the indices in the dataset."""

    content: Any
    indices: Any


@dataclass
class SampleLog:
    """Where a rank notes what it consumes, and the file that says how many seconds a step is to take.

    They are spent in its data, its forward pass and its update alike, so that what happens at random meets all of them."""

    folder: Path
    pace: Path
    samples: int  # of a step on one rank
    microbatches: int
    _file: int | None = field(default=None, init=False)

    def consumed(self, indices: Sequence[int]) -> None:
        if self._file is None:
            name = f"{os.environ[NUMBER]}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
            self._file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            register_optimizer_step_post_hook(self._updated)
        self._write(list(indices))
        self.pause(self.microbatches)

    def _updated(self, *optimizer: object) -> None:
        self._write()
        self.pause(1)

    def _write(self, *indices: list[int]) -> None:
        assert self._file is not None
        os.write(self._file, json.dumps([time.monotonic(), *indices]).encode() + b"\n")

    def pause(self, times: int) -> None:
        """One of so many in a step."""
        with suppress(OSError, ValueError):
            time.sleep(float(self.pace.read_text()) / 3 / times)


class _Samples:
    def __init__(self, dataset: Any, notes: SampleLog):
        self.dataset, self.notes = dataset, notes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> NumberedSample:
        self.notes.pause(self.notes.samples)
        return NumberedSample(self.dataset[index], index)


class _Batches(_Samples):
    def batch_of(self, indices: list[int]) -> NumberedSample:
        self.notes.pause(self.notes.microbatches)
        return NumberedSample(self.dataset.batch_of(indices), torch.tensor(indices))


def watched(kind: type[Task], notes: SampleLog) -> type[Task]:
    """The like of `kind`, without a validation split. Its batches know their samples, and the user's own methods do not see it."""

    def own(self: Any) -> Task:
        if "_own" not in vars(self):
            object.__setattr__(self, "_own", kind(**field_values(self)))  # tasks are frozen
        found: Task = vars(self)["_own"]
        return found

    def dataset(self: Any, split: str) -> Any:
        found = own(self).dataset(split) if split == "train" else None
        if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
            return found
        return (_Batches if hasattr(found, "batch_of") else _Samples)(found, notes)

    def passed_on(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any) -> Any:
            if name == "loss":
                _note(notes, *arguments)
            return getattr(own(self), name)(
                *(one.content if isinstance(one, NumberedSample) else one for one in arguments)
            )

        return method

    # A method that a task does not define says something: that its items weigh the same.
    methods = {
        name: passed_on(name)
        for name in METHODS
        if name == "inputs" or getattr(kind, name) is not getattr(Task, name)
    }
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "dataset": dataset, **methods})


def _note(notes: SampleLog, output: Any, batch: Any) -> None:
    """In training on a rank; not where a loss is tried on tensors without values."""
    if "RANK" not in os.environ or not torch.is_grad_enabled() or not isinstance(batch, NumberedSample):
        return
    if type(batch.indices) is Tensor and not batch.indices.is_meta:
        notes.consumed(batch.indices.tolist())

"""A wrapper of the user's task for the ranks of a drill. It logs consumed samples and slows steps down."""

import functools
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

from paceline.drill.bit_flip import RankFlip
from paceline.drill.training import NUMBER
from paceline.task import Task, field_values

METHODS = (
    *("model", "inputs", "loss", "loss_weights", "weights", "metrics"),
    *("layout", "lr_factor", "optimizer", "pretrained"),
)


class NumberedSample(NamedTuple):
    """A sample or a batch with its indices in the dataset."""

    content: Any
    indices: Any


@dataclass
class SampleLog:
    """The log of the samples that a rank consumes, and the pace of its steps.

    A step is slowed down equally in its data, forward pass and update, so that a random fault may hit each of
    them.

    pace: file with the seconds that a step should take."""

    folder: Path
    pace: Path
    samples: int  # per step and rank
    microbatches: int
    flip: RankFlip = field(init=False)
    _file: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.flip = RankFlip(self.folder.parent)

    def log_batch(self, indices: Sequence[int]) -> None:
        if self._file is None:
            name = f"{os.environ[NUMBER]}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
            self._file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            register_optimizer_step_post_hook(self._log_update)
        self._write(list(indices))
        self.pause(self.microbatches)

    def _log_update(self, *optimizer: object) -> None:
        self._write()
        self.pause(1)

    def _write(self, *indices: list[int]) -> None:
        assert self._file is not None
        os.write(self._file, json.dumps([time.monotonic(), *indices]).encode() + b"\n")

    def pause(self, count: int) -> None:
        """Sleep for one of `count` pauses of a phase; a phase is a third of the step."""
        with suppress(OSError, ValueError):
            time.sleep(float(self.pace.read_text()) / 3 / count)


class _Samples:
    def __init__(self, dataset: Any, log: SampleLog):
        self.dataset, self.log = dataset, log

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> NumberedSample:
        self.log.pause(self.log.samples)
        return NumberedSample(self.dataset[index], index)


class _Batches(_Samples):
    @property
    def replaces_collate(self) -> bool:
        return getattr(self.dataset, "replaces_collate", False)

    def batch_of(self, indices: list[int]) -> NumberedSample:
        self.log.pause(self.log.microbatches)
        return NumberedSample(self.dataset.batch_of(indices), torch.tensor(indices))


def wrap_task(kind: type[Task], log: SampleLog) -> type[Task]:
    """Return a task class like `kind` that logs its samples and has no validation split.

    Its batches carry their indices; the user's methods do not see them."""

    def unwrap(self: Any) -> Task:
        if "_own" not in vars(self):
            object.__setattr__(self, "_own", kind(**field_values(self)))  # tasks are frozen
        task: Task = vars(self)["_own"]
        return task

    def dataset(self: Any, split: str) -> Any:
        samples = unwrap(self).dataset(split) if split == "train" else None
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            return samples
        return (_Batches if hasattr(samples, "batch_of") else _Samples)(samples, log)

    def forward_method(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **counts: Any) -> Any:
            if name == "loss":
                _log_loss(log, *arguments)
            elif name == "inputs" and _is_trained(*arguments):
                log.flip.flip("data", arguments[0].content)
            return getattr(unwrap(self), name)(
                *(
                    argument.content if isinstance(argument, NumberedSample) else argument
                    for argument in arguments
                ),
                **counts,
            )

        # Its signature says what it is called with.
        return functools.wraps(kind.lr_factor)(method) if name == "lr_factor" else method

    def collate(self: Any, samples: list[NumberedSample]) -> NumberedSample:
        contents = unwrap(self).collate([sample.content for sample in samples])
        return NumberedSample(contents, torch.tensor([sample.indices for sample in samples]))

    def augment_method(name: str) -> Callable[..., Any]:
        def method(self: Any, sample: NumberedSample, rng: Any) -> NumberedSample:
            return NumberedSample(getattr(unwrap(self), name)(sample.content, rng), sample.indices)

        return method

    # A method that the task does not define stays undefined: its absence has a meaning, e.g. equal weights.
    methods = {
        name: forward_method(name)
        for name in METHODS
        if name == "inputs" or getattr(kind, name) is not getattr(Task, name)
    }
    if kind.collate is not Task.collate:
        methods["collate"] = collate
    for name in ("transform", "batch_transform"):
        if getattr(kind, name) is not getattr(Task, name):
            methods[name] = augment_method(name)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "dataset": dataset, **methods})


def _log_loss(log: SampleLog, output: Any, batch: Any) -> None:
    """Log a batch if a rank trains on it; not if the loss is tried out on tensors without values."""
    if _is_trained(batch):
        log.log_batch(batch.indices.tolist())
        log.flip.flip("activation", output)


def _is_trained(batch: Any) -> bool:
    """Return whether a rank trains on a batch, and does not only try out the loss."""
    if "RANK" not in os.environ or not torch.is_grad_enabled() or not isinstance(batch, NumberedSample):
        return False
    return type(batch.indices) is Tensor and not batch.indices.is_meta

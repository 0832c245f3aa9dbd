"""Sums over the samples of a batch, which are added over micro-batches and ranks."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.samples import Batch
from paceline.distributed.dtensor import is_dtensor
from paceline.errors import TaskError
from paceline.task import Task
from paceline.user_code import UserCode

Sums = dict[str, Tensor]
UNLIKE = (
    "batch_sums() returned {} on this rank, and other names, shapes or types on other ranks; return the same "
    "on all"
)


def read_sums(task: Task, output: Any, batch: Batch) -> Sums:
    """Return the sums over the samples of a batch, as whole tensors. Raises TaskError.

    Integers become float64: torch would divide them in float32.
    """
    with UserCode("batch_sums()", task.batch_sums):
        sums: Any = task.batch_sums(output, batch)
    if not isinstance(sums, Mapping):
        raise TaskError(f"batch_sums() must return a dict of tensors, got {type(sums).__name__}")
    for name, value in sums.items():
        if not isinstance(name, str):
            raise TaskError(f"batch_sums() must return a dict with names as keys, got {name!r}")
        if not isinstance(value, Tensor):
            raise TaskError(
                f"batch_sums() must return a dict of tensors, got {type(value).__name__} for {name!r}"
            )
        if value.is_complex():
            dtype = str(value.dtype).removeprefix("torch.")
            raise TaskError(f"batch_sums() must return real tensors, got {dtype} for {name!r}")
    whole = {name: value.full_tensor() if is_dtensor(value) else value for name, value in sums.items()}
    return {name: value if value.is_floating_point() else value.double() for name, value in whole.items()}


class SumsOfParts:
    """Sums over parts of a batch or split, which are added in float64. All parts must have the same names."""

    def __init__(self) -> None:
        self.sums: Sums = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, sums: Sums, is_counted: bool = True) -> None:
        """Add the sums of a part. is_counted: whether its samples count. Raises TaskError."""
        values = {name: value.detach().to(torch.float64) for name, value in sums.items()}
        if not is_counted:
            values = {name: torch.zeros_like(value) for name, value in values.items()}
        if self.dtypes:
            for name in self.dtypes.keys() ^ values.keys():
                raise TaskError(f"batch_sums() returned {name!r} only in some batches; return it in all")
            for name, value in values.items():
                if value.shape != self.sums[name].shape:
                    raise TaskError(
                        f"batch_sums() returned {name!r} of shape {tuple(self.sums[name].shape)}, and later "
                        f"{tuple(value.shape)}; return sums over the samples, whose shape does not depend on "
                        "their number"
                    )
            values = {name: self.sums[name] + values[name] for name in self.sums}
        self.sums = values
        # At least float32, so that a sum of many parts stays exact enough.
        self.dtypes = self.dtypes or {
            name: torch.promote_types(value.dtype, torch.float32) for name, value in sums.items()
        }

    def reduce(self, device: torch.device, group: dist.ProcessGroup | None) -> Sums:
        """Return the sums over all ranks. A collective: all ranks have sums of the same names and shapes."""
        flat = torch.cat([value.reshape(-1).to(device) for value in self.sums.values()])
        dist.all_reduce(flat, group=group)
        parts = flat.split([value.numel() for value in self.sums.values()])
        return self._restore(
            {
                name: part.view(value.shape)
                for part, (name, value) in zip(parts, self.sums.items(), strict=True)
            }
        )

    def reduce_unlike(self, device: torch.device, group: dist.ProcessGroup | None) -> Sums:
        """Return the sums over all ranks, some of which may have none. A collective. Raises TaskError."""
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, self.describe(), group=group)
        known = [described for described in by_rank if described]
        if not known:
            return {}
        if any(described != known[0] for described in known):
            raise TaskError(UNLIKE.format(self._listed()))
        if not self.sums:
            self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape, _ in known[0]}
            self.dtypes = {name: dtype for name, _, dtype in known[0]}
        return self.reduce(device, group)

    def whole(self) -> Sums:
        """Return the sums over the parts of this rank."""
        return self._restore(self.sums)

    def _restore(self, sums: Sums) -> Sums:
        return {name: value.to(self.dtypes[name]) for name, value in sums.items()}

    def describe(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return the name, shape and type of each sum."""
        return [(name, tuple(value.shape), self.dtypes[name]) for name, value in self.sums.items()]

    def check_equal_on_ranks(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Raise TaskError on all ranks if their sums differ in names, shapes or types. A collective."""
        checksum = zlib.crc32(repr(self.describe()).encode())
        bounds = torch.tensor([checksum, -checksum], device=device)
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=group)
        lowest, minus_highest = bounds.tolist()
        if lowest != -minus_highest:
            raise TaskError(UNLIKE.format(self._listed()))

    def _listed(self) -> str:
        return ", ".join(f"{name!r} of shape {shape}" for name, shape, _ in self.describe()) or "nothing"

"""Accumulators of a task's metrics: merged over the batches of a rank, and then over the ranks."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import TaskError
from paceline.metrics import Accumulator
from paceline.plan.plan import ResolvedPlan
from paceline.training.evaluation.torchmetrics_adapter import class_name
from paceline.user_code import UserCode

MAX_VALUES = 10_000  # of one metric: they are written to a line of events.jsonl
CLASS = "class of the accumulator"


class AccumulatedMetrics:
    """The accumulators of one rank, by name, each merged over the batches so far."""

    def __init__(self) -> None:
        self.merged: dict[str, Accumulator] = {}

    def add(self, name: str, value: Accumulator, is_counted: bool) -> None:
        """Merge the accumulator of a batch.

        is_counted: whether its samples count on this rank. Raises TaskError if the task keeps accumulators
        over batches.
        """
        if value._is_returned:
            raise TaskError(
                f"metrics() returned the same {class_name(value)} object for {name!r} again, which still "
                "has the samples of an earlier batch; create a new metric in each call of metrics()"
            )
        object.__setattr__(value, "_is_returned", True)  # it may be a frozen dataclass
        if not is_counted:
            return
        self._merge(name, value)

    def finish(self, plan: ResolvedPlan, rank: int, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return the metrics of the accumulators of all ranks. A collective.

        The values are identical on all ranks. Raises TaskError on all ranks if the task's code raises on the
        rank that merges.
        """
        if dist.get_world_size(group) == 1:
            return self._finish()
        root = find_root(plan, dist.get_world_size(group))
        states: list[Any] = [None] * dist.get_world_size(group)
        state = {name: _to_bytes(name, value) for name, value in self.merged.items()}
        dist.gather_object(state, states if rank == root else None, root, group=group)
        answer: list[Any] = [None]
        if rank == root:
            try:
                answer = [self._finish_all(states)]
            except TaskError as error:
                answer = [error]
        dist.broadcast_object_list(answer, root, group=group)
        if isinstance(answer[0], TaskError):
            raise answer[0]
        values: dict[str, float] = answer[0]
        return values

    def _finish_all(self, states: list[dict[str, bytes]]) -> dict[str, float]:
        """Merge the accumulators of all ranks into those of this rank, in the order of ranks."""
        kinds = {name: type(value) for name, value in self.merged.items()}
        self.merged = {}
        for state in states:
            for name, data in state.items():
                if name not in kinds:
                    raise TaskError(
                        f"metrics() returned {name!r} only in some batches; return it for each batch"
                    )
                self._merge(name, _from_bytes(name, data, kinds[name]))
        return self._finish()

    def _merge(self, name: str, value: Accumulator) -> None:
        merged = self.merged.setdefault(name, value)
        if merged is value:
            return
        # A class that is defined in metrics() is a different object in each call.
        if type(value).__qualname__ != type(merged).__qualname__:
            raise TaskError(
                f"metrics() returned a {type(merged).__name__} and a {type(value).__name__} for {name!r}; "
                "return the same class for each batch"
            )
        with UserCode(f"merge() of metric {name!r}", type(merged).merge):
            merged.merge(value)

    def _finish(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in self.merged.items():
            with UserCode(f"finish() of metric {name!r}", type(value).finish):
                result = value.finish()
            for key, number in read_numbers(name, result).items():
                if key in values:
                    raise TaskError(f"metrics() returned two metrics named {key!r}; rename one of them")
                values[key] = number
        return values


def find_root(plan: ResolvedPlan, num_ranks: int) -> int:
    """Return the first rank that counts samples. It has a sample of every split."""
    return next(
        rank
        for rank in range(num_ranks)
        if (place := plan.place(rank)).pp == plan.loss_pp_rank and not (place.dp or place.cp or place.tp)
    )


def read_numbers(name: str, result: Any) -> dict[str, float]:
    """Return what `finish` returned as numbers by name: of a tensor by index, of a dict by key.

    Raises TaskError for anything else.
    """
    if isinstance(result, Mapping):
        return {
            path: number
            for key, item in result.items()
            for path, number in read_numbers(f"{name}/{key}", item).items()
        }
    if isinstance(result, (bool, int, float)):
        return {name: float(result)}
    if not isinstance(result, Tensor):
        raise TaskError(
            f"finish() of metric {name!r} must return a number, a tensor or a dict of these, "
            f"got {type(result).__name__}"
        )
    if result.is_complex():
        dtype = str(result.dtype).removeprefix("torch.")
        raise TaskError(f"finish() of metric {name!r} must return real numbers, got {dtype}")
    if result.numel() == 1:
        return {name: float(result)}
    if not 0 < result.numel() <= MAX_VALUES:
        raise TaskError(
            f"finish() of metric {name!r} returned {result.numel():,} numbers; return at least 1 and at most "
            f"{MAX_VALUES:,}"
        )
    indices = torch.ones_like(result, dtype=torch.bool).nonzero().tolist()
    return {
        "/".join([name, *map(str, index)]): number
        for index, number in zip(indices, result.double().flatten().tolist(), strict=True)
    }


class _AccumulatorPickler(pickle.Pickler):
    """Pickles an accumulator without its class, which other ranks may know by another module or not at all.

    A class that is defined in a function cannot be pickled. Tensors are sent from the CPU, without the part
    of their storage that they do not show.
    """

    def __init__(self, file: io.BytesIO, kind: type[Accumulator]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kind = kind

    def persistent_id(self, value: Any) -> str | None:
        return CLASS if value is self.kind else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _AccumulatorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kind: type[Accumulator]):
        super().__init__(file)
        self.kind = kind

    def persistent_load(self, name: Any) -> type[Accumulator]:
        return self.kind


def _to_bytes(name: str, value: Accumulator) -> bytes:
    file = io.BytesIO()
    with _state_code(name, type(value)):
        _AccumulatorPickler(file, type(value)).dump(value)
    return file.getvalue()


def _from_bytes(name: str, data: bytes, kind: type[Accumulator]) -> Accumulator:
    with _state_code(name, kind):
        value: Accumulator = _AccumulatorUnpickler(io.BytesIO(data), kind).load()
    return value


def _state_code(name: str, kind: type[Accumulator]) -> UserCode:
    return UserCode(
        f"sending the state of metric {name!r} to another rank",
        kind.update,
        hint="keep tensors, numbers, strings, lists and dicts in the attributes of an accumulator",
    )

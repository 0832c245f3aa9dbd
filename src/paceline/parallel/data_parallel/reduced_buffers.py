"""Buffers that forward passes change, and whose changes combine as the task declares in `Layout.buffers`.

In a step, each forward pass starts from the values that the buffers had before the step. After the step, the
values of all passes are combined. So the result is that of one pass of the whole batch, if the change is of
the declared kind.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import PlanError, TaskError
from paceline.parallel.blocks import find_blocks
from paceline.plan.plan import ResolvedPlan
from paceline.spec import abbreviate, suggest
from paceline.task import BufferSum, Layout, Task, read_layout

MEAN, NONE = "mean", "none"
Reduction = BufferSum | Literal["mean", "none"]
REDUCTIONS: dict[str, Reduction] = {"sum": BufferSum(), "mean": "mean", "none": "none"}


def read_reductions(layout: Layout, model: nn.Module) -> dict[str, Reduction]:
    """Return how the changes of the declared buffers combine, by the first name of each buffer.

    Raises TaskError for patterns without a buffer, and for buffers that cannot be combined so.
    """
    declared = layout.buffers if layout.buffers is not None else {}
    if not isinstance(declared, Mapping):
        raise TaskError(
            f"layout().buffers must be a dict of patterns of names, got {type(declared).__name__}"
        )
    named = dict(model.named_buffers(remove_duplicate=False))
    first_names = {id(buffer): name for name, buffer in model.named_buffers()}
    batch_norm = find_batch_norm_buffers(model)
    reductions: dict[str, Reduction] = {}
    for pattern, value in declared.items():
        reduction = _read_reduction(pattern, value)
        matching = [name for name in named if fnmatch.fnmatchcase(name, str(pattern))]
        if not matching:
            hint = suggest(str(pattern), named) or "; the model has no buffers"
            raise TaskError(f"layout().buffers: no buffer of the model matches {abbreviate(pattern)}{hint}")
        for name in matching:
            first = first_names[id(named[name])]
            if first in batch_norm:
                raise TaskError(
                    f"layout().buffers: {name} belongs to BatchNorm, whose statistics are already those of "
                    f"all ranks; use a pattern that does not match it, in place of {abbreviate(pattern)}"
                )
            _check_dtype(name, named[name], reduction)
            if reductions.setdefault(first, reduction) != reduction:
                raise TaskError(
                    f"layout().buffers: {name} matches two patterns with different values; use patterns of "
                    "which one matches it"
                )
    return reductions


def find_batch_norm_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers of BatchNorm layers."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, _ in module.named_buffers(recurse=False)
    }


def _read_reduction(pattern: object, value: object) -> Reduction:
    if isinstance(value, BufferSum):
        return value
    if isinstance(value, str) and value in REDUCTIONS:
        return REDUCTIONS[value]
    raise TaskError(
        f"layout().buffers[{abbreviate(pattern)}] is {abbreviate(value)}; expected 'sum', 'mean', 'none' or "
        "a paceline.BufferSum"
    )


def _check_dtype(name: str, buffer: Tensor, reduction: Reduction) -> None:
    if reduction == NONE or buffer.is_floating_point():
        return
    dtype = str(buffer.dtype).removeprefix("torch.")
    if buffer.dtype == torch.bool or buffer.is_complex():
        raise TaskError(f"layout().buffers: {name} has dtype {dtype}, which cannot be combined; use 'none'")
    if isinstance(reduction, BufferSum) and reduction.decay not in (0, 1):
        raise TaskError(
            f"layout().buffers: {name} has dtype {dtype}, and decay={reduction.decay} requires a "
            "floating-point buffer; register it as float"
        )


def list_first(names: Sequence[str]) -> str:
    """Return the first of these names."""
    return f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}"


def check_reduced_buffers(task: Task, plan: ResolvedPlan, model: nn.Module, compiles: bool = False) -> None:
    """Raise TaskError for declarations that do not fit the model, PlanError if `plan` cannot obey them.

    compiles: whether blocks are compiled.
    """
    layout = read_layout(task)
    reductions = read_reductions(layout, model)
    combined = [name for name, reduction in reductions.items() if reduction != NONE]
    if not combined:
        return
    if plan.is_asynchronous:
        raise PlanError(
            f"plan {plan} cannot combine the changes of buffer {combined[0]!r} as layout() declares, because "
            "its ranks update their weights separately; use single, ddp, zero1 to zero3, hsdp, tp or pp, or "
            "declare 'none'"
        )
    if type(task).updates is not Task.updates and plan.data_ranks * plan.microbatches > 1:
        raise PlanError(
            f"plan {plan} cannot combine the changes of buffer {combined[0]!r} as layout() declares, because "
            "updates() runs several passes in a step; use single, or declare 'none'"
        )
    is_repeated = compiles and plan.recompute == "selective"
    divided = [
        *(["cp runs blocks on slices of the sequence"] if plan.cp > 1 else []),
        *(["a recomputed block that is compiled changes buffers twice"] if is_repeated else []),
    ]
    if not divided:
        return
    units = find_blocks(model, layout) or [model]
    inside = {id(buffer) for unit in units for buffer in unit.buffers()}
    for name, buffer in model.named_buffers():
        if name in combined and id(buffer) in inside:
            raise PlanError(
                f"plan {plan}: {divided[0]}, and buffer {name!r}, whose changes layout() combines, is in a "
                "block; use a plan without it, or keep the buffer outside of the blocks"
            )


@dataclass
class _ReducedBuffer:
    """A buffer, its value before the step, and the sum of what the passes of the step contribute.

    places: modules with the buffer, and its key there. stage: of a pipeline, the stage that contributes.
    """

    name: str
    reduction: Reduction
    places: Sequence[tuple[nn.Module, str]]
    stage: int | None
    start: Tensor = field(init=False)
    total: Tensor = field(init=False)

    @property
    def value(self) -> Tensor:
        module, key = self.places[0]
        value = module._buffers[key]
        assert value is not None
        return value

    def put(self, values: Sequence[Tensor | None]) -> None:
        for (module, key), value in zip(self.places, values, strict=True):
            module._buffers[key] = value

    def begin(self) -> None:
        self.start = self.value
        if self.start.is_floating_point():
            dtype = torch.promote_types(self.start.dtype, torch.float32)
        else:
            dtype = torch.float64 if self.reduction == MEAN else torch.int64
        self.total = torch.zeros_like(self.start, dtype=dtype)

    def _kept(self) -> Tensor:
        """Return what remains of the value before the step, to which sums are added."""
        assert isinstance(self.reduction, BufferSum)
        start = self.start.to(self.total.dtype)
        if self.reduction.decay in (0, 1):
            return start * int(self.reduction.decay)
        return start * self.reduction.decay

    def add(self, value: Tensor, weight: float) -> None:
        """Add the value after a pass. `weight`: share of its samples in the global batch."""
        if value.shape != self.start.shape:
            raise TaskError(
                f"the model changed the shape of buffer {self.name!r} from {tuple(self.start.shape)} to "
                f"{tuple(value.shape)}, so its changes cannot be combined; declare 'none' in layout().buffers"
            )
        value = value.detach().to(self.total.dtype)
        self.total += value * weight if self.reduction == MEAN else value - self._kept()

    def finish(self, total: Tensor) -> None:
        """Set the buffer to the combined value. `total`: over all ranks."""
        if isinstance(self.reduction, BufferSum):
            total = self._kept() + total
        elif not self.start.is_floating_point():
            total = total.round()
        self.start.copy_(total)


class BufferReducer:
    """Combines the changes of the declared buffers of the model of this rank.

    Call `begin` before the passes of a step, each pass in the context of `new_pass`, and `finish` after the
    backward passes.

    reductions: as by `read_reductions`.
    weight: share of the samples of a micro-batch of this rank in the global batch.
    group, ranks: the ranks that have other samples for the same layers, and their number; group None: all.
    stages: of a pipeline, the stage of this rank that contributes by name; buffers without one are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        reductions: Mapping[str, Reduction],
        weight: float,
        group: dist.ProcessGroup | None,
        ranks: int,
        stages: Mapping[str, int] | None = None,
    ):
        self.weight, self.group, self.ranks = weight, group, ranks
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                places.setdefault(id(buffer), []).append((module, key))
        self.buffers = [
            _ReducedBuffer(name, reductions[name], places[id(buffer)], stages[name] if stages else None)
            for name, buffer in model.named_buffers()
            if reductions.get(name, NONE) != NONE and (stages is None or name in stages)
        ]

    def begin(self) -> None:
        """Begin a step, or begin it again."""
        for buffer in self.buffers:
            buffer.begin()

    @contextmanager
    def new_pass(self, stage: int | None = None) -> Iterator[None]:
        """Give a forward pass the values before the step, and add what it makes of them.

        The pass has tensors of its own, since autograd may keep them until the backward pass. stage: of a
        pipeline.
        """
        before = [[module._buffers[key] for module, key in buffer.places] for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.put([buffer.start.clone()] * len(buffer.places))
        try:
            yield
        finally:
            for buffer, values in zip(self.buffers, before, strict=True):
                after = buffer.value
                buffer.put(values)
                if buffer.stage == stage:
                    with torch.no_grad():
                        buffer.add(after, self.weight)

    @torch.no_grad()
    def finish(self) -> None:
        """Set the buffers to the combined values. A collective."""
        for dtype in sorted({buffer.total.dtype for buffer in self.buffers}, key=str):
            same = [buffer for buffer in self.buffers if buffer.total.dtype == dtype]
            flat = torch.cat([buffer.total.flatten() for buffer in same])
            if self.ranks > 1:
                dist.all_reduce(flat, group=self.group)
            parts = flat.split([buffer.total.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                buffer.finish(part.view_as(buffer.start))


def describe_own_buffers(reductions: Mapping[str, Reduction]) -> str | None:
    """Return a note on buffers of which each rank has its own values; None if there are none."""
    names = [name for name, reduction in reductions.items() if reduction == NONE]
    if not names:
        return None
    return (
        f"each rank has its own values of the buffers that layout() declares 'none' ({list_first(names)}); "
        "checkpoints have those of rank 0"
    )

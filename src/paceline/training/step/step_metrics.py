"""Metrics of steps, reduced over the ranks while later steps run. Quick steps share one all-reduce."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import TaskError
from paceline.events import Step
from paceline.parallel.loss.named_losses import check_same_names, name_losses
from paceline.spec import StepBatches
from paceline.training.optimization.gradient_norm import combine_norms

REDUCE_EVERY_S = 0.1  # quicker steps share one reduction about this often
MAX_STEPS_PER_REDUCTION = 64


class LocalStepStats(NamedTuple):
    """Metrics of a step on this rank. They add up over the ranks: sums, and squares of the norm."""

    loss: Tensor | float  # × items
    items: Tensor | float
    # of the gradients that this rank counts, or a list with the norm of each of their tensors
    norm: Tensor | list[Tensor]
    expected: float | None  # items that the loss was divided by, if their number was only inferred
    named: Mapping[str, Tensor | float] | None = None  # named losses × items; None: this rank does not count
    # Of each pass of a step with several, by the name of its update ("": the task's own loss).
    passes: "Mapping[str, LocalStepStats]" = MappingProxyType({})

    def by_pass(self) -> "Mapping[str, LocalStepStats]":
        """Return the metrics of each pass of the step; a step with one pass is that of the task's loss."""
        return self.passes or {"": self}


class StepMetrics(NamedTuple):
    """Metrics of a step, the same on all ranks."""

    loss: float
    grad_norm: float  # not finite if fp16 overflowed and the update was skipped
    losses: Mapping[str, float] = MappingProxyType({})  # by the names under which a step reports them


class LaunchedStep(NamedTuple):
    """A step of this rank that has run, but whose metrics are not reduced yet."""

    stats: LocalStepStats
    step: int
    lr: float
    data_s: float
    step_s: float
    time: float

    def event(self, metrics: StepMetrics, batches: StepBatches) -> Step:
        """Return the event of this step. batches: samples of each step over all ranks."""
        return Step(
            time=self.time,
            step=self.step,
            samples=batches.samples_before(self.step),
            loss=metrics.loss,
            losses=dict(metrics.losses),
            grad_norm=metrics.grad_norm if math.isfinite(metrics.grad_norm) else None,
            lr=self.lr,
            step_s=self.step_s,
            data_s=self.data_s,
            samples_per_s=batches.batch_of(self.step - 1) / self.step_s,
        )


@dataclass(frozen=True)
class ControlFlags:
    """What a rank requests of all ranks after the reduced steps."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class ReducedMetrics:
    """The result of one reduction."""

    steps: list[StepMetrics]
    flags: ControlFlags  # set if any rank set them
    step_s: float  # mean over the ranks and these steps
    steps_per_reduction: int  # from now on; the same on all ranks


@dataclass
class PendingMetrics:
    """Metrics on their way from the other ranks and from the device."""

    sums: Tensor
    passes: list[dict[str, float | None]]  # of each step: its passes, and the expected items of each
    ranks: int
    work: dist.Work | None
    copied: torch.cuda.Event | None
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the named losses, by pass

    def result(self) -> ReducedMetrics:
        """Wait for the reduction and return it.

        Raises TaskError if the number of items is not the expected one.
        """
        if self.copied is not None:
            self.copied.synchronize()
        elif self.work is not None:
            self.work.wait()
        *sums, stop, save, seconds = self.sums.tolist()
        columns = _columns(self.names)
        width = 3 + len(columns)
        rows = (sums[begin : begin + width] for begin in range(0, len(sums), width))
        steps = [
            _combine_passes(
                {
                    name: _metrics_of_pass(next(rows), expected, self.names.get(name, ()), columns)
                    for name, expected in passes.items()
                }
            )
            for passes in self.passes
        ]
        step_s = seconds / (self.ranks * len(steps))
        steps_per_reduction = (
            min(MAX_STEPS_PER_REDUCTION, max(1, int(REDUCE_EVERY_S / step_s))) if step_s else 1
        )
        return ReducedMetrics(steps, ControlFlags(stop > 0, save > 0), step_s, steps_per_reduction)


def _metrics_of_pass(
    row: Sequence[float], expected: float | None, names: Iterable[str], columns: Sequence[str]
) -> StepMetrics:
    """Return the metrics of a pass. names: of its losses; columns: of the row after its first three."""
    loss, items, squares = row[:3]
    if expected is not None and items != expected:
        raise TaskError(
            f"loss() returned {items:.0f} items over all ranks and micro-batches, expected {expected:.0f} "
            "from the first; if their number varies, define weights(batch), so that each item has the "
            "same weight"
        )
    named = dict(zip(columns, row[3:], strict=True))
    losses = {name: named[name] / items if items else math.nan for name in names}
    return StepMetrics(loss / items if items else math.nan, math.sqrt(squares), losses)


def _combine_passes(passes: Mapping[str, StepMetrics]) -> StepMetrics:
    """Return the metrics of a step, given those of its passes. Raises TaskError if losses share a name."""
    losses: dict[str, float] = {}
    for name, metrics in passes.items():
        named = name_losses(name, metrics.loss, metrics.losses)
        if clashing := losses.keys() & named.keys():
            raise TaskError(f"two losses of a step are named {min(clashing)!r}; rename one of them")
        losses |= named
    return StepMetrics(
        sum(metrics.loss for metrics in passes.values()),
        math.hypot(*(metrics.grad_norm for metrics in passes.values())),
        losses,
    )


def agree_on_names(named: Mapping[str, Tensor | float] | None, ranks: int) -> list[str]:
    """Return the names of the losses of a pass, in the same order on all ranks. A collective.

    named: the losses on this rank; None if it does not count. Raises TaskError on all ranks if they differ.
    """
    by_rank: list[list[str] | None] = [None if named is None else list(named)]
    if ranks > 1:
        own, by_rank = by_rank[0], by_rank * ranks
        dist.all_gather_object(by_rank, own)
    counted = [names for names in by_rank if names is not None]
    for names in counted[1:]:
        check_same_names(frozenset(counted[0]), frozenset(names))
    return counted[0] if counted else []


def _columns(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each name that any pass has, once."""
    return list(dict.fromkeys(name for of_pass in names.values() for name in of_pass))


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return these numbers as one float64 tensor. (Writing them into a tensor one by one takes 3 µs each.)"""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values):
        return torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    return torch.stack(tensors).to(torch.float64)


def reduce_metrics_async(
    steps: Sequence[LocalStepStats],
    flags: ControlFlags,
    seconds: float,
    ranks: int,
    device: torch.device,
    names: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> PendingMetrics:
    """Start to reduce the metrics of `steps` over all ranks. A collective: all ranks pass the same steps.

    seconds: what these steps took on this rank. names: of the named losses by pass, the same on all ranks.
    """
    passes = [{name: part.expected for name, part in step.by_pass().items()} for step in steps]
    parts = [part for step in steps for part in step.by_pass().values()]
    # Norms are combined here and not in the step: many in a row find their code in the caches.
    norms = _column(
        [part.norm if isinstance(part.norm, Tensor) else combine_norms(part.norm, device) for part in parts],
        device,
    )
    # Of passes without this loss; a number among tensors would wait for the device.
    absent = torch.zeros((), dtype=torch.float64, device=device) if len(names) > 1 else 0.0
    columns = (
        _column([part.loss for part in parts], device),
        _column([part.items for part in parts], device),
        norms.square(),
        *(
            _column(
                [part.named.get(name, absent) if part.named is not None else 0.0 for part in parts], device
            )
            for name in _columns(names)
        ),
    )
    rest = torch.tensor([float(flags.stop), float(flags.save), seconds], dtype=torch.float64, device=device)
    sums = torch.cat([torch.stack(columns, dim=1).flatten(), rest])
    work = dist.all_reduce(sums, async_op=True) if ranks > 1 else None
    if device.type != "cuda":
        return PendingMetrics(sums, passes, ranks, work, None, names)
    if work is not None:
        work.wait()  # orders the streams; the host continues
    on_host = torch.empty(len(sums), dtype=torch.float64, pin_memory=True)
    on_host.copy_(sums, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return PendingMetrics(on_host, passes, ranks, None, copied, names)


class FinishedSteps(NamedTuple):
    """Steps with their reduced metrics."""

    steps: list[tuple[LaunchedStep, StepMetrics]]
    flags: ControlFlags  # set if any rank set them
    step_s: float  # mean over the ranks and these steps


class MetricsReducer:
    """Reduces the metrics of steps while later steps run.

    All ranks must make the same calls in the same order.

    At most one reduction is under way: call `finish` before `start`.
    """

    def __init__(self, ranks: int, device: torch.device):
        self.ranks, self.device = ranks, device
        self.names: dict[str, Sequence[str]] = {}  # of named losses, of each pass that was reduced
        self._launched: list[LaunchedStep] = []  # steps whose reduction has not started
        self._reducing: tuple[list[LaunchedStep], PendingMetrics] | None = None
        self._steps_per_reduction = 1

    def add(self, step: LaunchedStep) -> None:
        """Add a step to the next reduction."""
        self._launched.append(step)

    @property
    def has_launched(self) -> bool:
        """Whether the reduction of some step has not started."""
        return bool(self._launched)

    @property
    def is_due(self) -> bool:
        """Whether enough steps have run for the next reduction."""
        return len(self._launched) >= self._steps_per_reduction

    def start(self, flags: ControlFlags) -> None:
        """Start to reduce the metrics of all steps added since the last call. A collective."""
        assert self._reducing is None
        for launched in self._launched:
            for name, part in launched.stats.by_pass().items():
                if name not in self.names:
                    self.names[name] = agree_on_names(part.named, self.ranks)
        seconds = sum(launched.step_s for launched in self._launched)
        pending = reduce_metrics_async(
            [launched.stats for launched in self._launched],
            flags,
            seconds,
            self.ranks,
            self.device,
            dict(self.names),
        )
        self._launched, self._reducing = [], (self._launched, pending)

    def finish(self) -> FinishedSteps | None:
        """Wait for the reduction under way, and return its steps; None if there is none."""
        if self._reducing is None:
            return None
        (launched, pending), self._reducing = self._reducing, None
        reduced = pending.result()
        self._steps_per_reduction = reduced.steps_per_reduction
        if self.device.type == "cuda":  # the host waited in one step for the kernels of all
            step_s = statistics.mean(step.step_s for step in launched)
            data_s = statistics.mean(step.data_s for step in launched)
            launched = [step._replace(step_s=step_s, data_s=data_s) for step in launched]
        return FinishedSteps(list(zip(launched, reduced.steps, strict=True)), reduced.flags, reduced.step_s)

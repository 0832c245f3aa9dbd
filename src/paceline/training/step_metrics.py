"""What steps came to, added up over the ranks. Quick steps travel together, and all are read while a later step runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import TaskError
from paceline.training.optimizer import combined

EVERY_S = 0.1  # steps that are quicker are told together, about so often
MOST = 64  # steps told together


class LocalStepStats(NamedTuple):
    """What a step came to on this rank. The parts of all ranks add up to the whole: sums, and the square of the norm."""

    loss: Tensor | float  # × items
    items: Tensor | float
    norm: (
        Tensor | list[Tensor]
    )  # of what is counted here of the gradient, or the norms of the tensors that it consists of
    expected: float | None  # items that the loss was divided by, where they were only inferred


class StepMetrics(NamedTuple):
    """What a step came to, the same on all ranks."""

    loss: float
    grad_norm: float  # not finite where fp16 overflowed and the update was left out


@dataclass(frozen=True)
class ControlFlags:
    """What this rank would like all ranks to do after the steps that are told."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class ReducedMetrics:
    steps: list[StepMetrics]
    wishes: ControlFlags  # of any rank
    step_s: float  # mean over the ranks and these steps
    together: int  # steps to be told together from now on, so that all ranks agree


@dataclass
class Pending:
    """Figures on their way from the other ranks and the device."""

    sums: Tensor
    expected: list[float | None]
    ranks: int
    work: dist.Work | None
    copied: torch.cuda.Event | None

    def result(self) -> ReducedMetrics:
        if self.copied is not None:
            self.copied.synchronize()
        elif self.work is not None:
            self.work.wait()
        *sums, stop, save, seconds = self.sums.tolist()
        steps = list(map(_figures, sums[0::3], sums[1::3], sums[2::3], self.expected))
        step_s = seconds / (self.ranks * len(steps))
        together = min(MOST, max(1, int(EVERY_S / step_s))) if step_s else 1
        return ReducedMetrics(steps, ControlFlags(stop > 0, save > 0), step_s, together)


def _figures(loss: float, items: float, squares: float, expected: float | None) -> StepMetrics:
    if expected is not None and items != expected:
        raise TaskError(
            f"loss() returned {items:.0f} items over all ranks and micro-batches where the first let expect {expected:.0f}; "
            "where their number varies, define weights(batch), so that each item weighs the same"
        )
    return StepMetrics(loss / items if items else math.nan, math.sqrt(squares))


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """These numbers in float64. (To write them into a tensor one after the other takes 3 µs each.)"""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values):
        return torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    return torch.stack(tensors).to(torch.float64)


def reduce_metrics_async(
    steps: Sequence[LocalStepStats], wishes: ControlFlags, seconds: float, ranks: int, device: torch.device
) -> Pending:
    """Start to add up the figures of `steps`, which took so many seconds on this rank. A collective: all ranks tell of the same steps."""
    # Here and not in the step: many in a row find their code in the caches.
    norms = _column(
        [step.norm if isinstance(step.norm, Tensor) else combined(step.norm, device) for step in steps],
        device,
    )
    columns = (
        _column([step.loss for step in steps], device),
        _column([step.items for step in steps], device),
        norms.square(),
    )
    rest = torch.tensor([float(wishes.stop), float(wishes.save), seconds], dtype=torch.float64, device=device)
    sums = torch.cat([torch.stack(columns, dim=1).flatten(), rest])
    expected = [step.expected for step in steps]
    work = dist.all_reduce(sums, async_op=True) if ranks > 1 else None
    if device.type != "cuda":
        return Pending(sums, expected, ranks, work, None)
    if work is not None:
        work.wait()  # orders the streams; the host goes on
    on_host = torch.empty(len(sums), dtype=torch.float64, pin_memory=True)
    on_host.copy_(sums, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Pending(on_host, expected, ranks, None, copied)

"""One update: forward and backward over the micro-batches, the norm of the whole gradient, clipping, the optimizer."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from paceline.errors import TaskError
from paceline.task import Task
from paceline.training.data import Batch
from paceline.training.optim import Norm, scale_
from paceline.training.seeds import derive, start_stream

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Figures:
    """What a step came to, the same on all ranks."""

    loss: float
    grad_norm: float  # not finite where fp16 overflowed and the update was left out
    stop: bool  # some rank wants to stop
    save: bool  # some rank wants a checkpoint


@dataclass(frozen=True)
class Wishes:
    """What this rank would like all ranks to do after this step."""

    stop: bool = False
    save: bool = False


@dataclass
class Pending:
    """The figures of a step, on their way from the other ranks and the device: read them one step later, and nothing waits."""

    sums: Tensor  # loss × items, items, squared norm, ranks that want to stop, and to save
    expected: float | None  # items that the loss was divided by, where they were only inferred
    work: dist.Work | None
    copied: torch.cuda.Event | None

    def result(self) -> Figures:
        if self.copied is not None:
            self.copied.synchronize()
        elif self.work is not None:
            self.work.wait()
        loss, items, squares, stop, save = self.sums.tolist()
        if self.expected is not None and items != self.expected:
            raise TaskError(
                f"loss() returned {items:.0f} items over all ranks and micro-batches where the first let expect {self.expected:.0f}; "
                "where their number varies, define weights(batch), so that each item weighs the same"
            )
        return Figures(loss / items if items else math.nan, math.sqrt(squares) if squares >= 0 else math.nan, stop > 0, save > 0)


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., Mixed precision training, 2018), decided by the norm of the whole
    gradient, so that all ranks agree. torch's GradScaler looks at each rank's shards alone."""

    scale: float = 65536.0
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == 2000:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass
class Step:
    """Call it with the micro-batches of a step. All that is not an argument of the call is the same for each step."""

    task: Task
    model: nn.Module  # as laid out
    optimizer: torch.optim.Optimizer
    params: Sequence[nn.Parameter]
    rank: int
    ranks: int
    device: torch.device
    precision: str
    clip: float | None
    seed: int
    base_lrs: list[float] = field(init=False)
    norm: Norm = field(init=False)
    loss_scale: LossScale | None = field(init=False)

    def __post_init__(self) -> None:
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.norm = Norm(self.params, self.rank, self.ranks)
        self.loss_scale = LossScale() if self.precision == "fp16" else None

    def __call__(self, batches: Sequence[Batch], step: int, lr_factor: float, wishes: Wishes) -> Pending:
        loss, items, expected = self.backward(batches, step)
        squares = self.update(lr_factor)
        return self._share(loss, items, squares, wishes, expected)

    def backward(self, batches: Sequence[Batch], step: int) -> tuple[Tensor, Tensor | float, float | None]:
        """Add up the gradients of all micro-batches. Returns this rank's loss × items and items, and the items expected over all ranks."""
        weight = GlobalWeight(self.task, batches) if type(self.task).weights is not Task.weights else None
        loss_here: Tensor | float = 0.0
        items_here: Tensor | float = 0.0
        whole: Tensor | float | None = None
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            start_stream(derive(self.seed, "model", step, micro, self.rank), self.device)
            with self._sync_if(last):
                with autocast(self.precision, self.device):
                    loss, items = weighed_loss(self.task, self.model, batch)
                if whole is None:
                    whole = weight.result() if weight is not None else float(items) * len(batches) * self.ranks
                scaled = loss * (self.ranks / whole)  # the engines average over the ranks
                (scaled if self.loss_scale is None else scaled * self.loss_scale.scale).backward()
            loss_here = loss_here + loss.detach()
            items_here = items_here + items
        assert isinstance(loss_here, Tensor)
        return loss_here, items_here, whole if isinstance(whole, float) else None

    @torch.no_grad()
    def update(self, lr_factor: float) -> Tensor | None:
        """Clip, step and drop the gradients. Returns this rank's part of the squared norm of the whole gradient."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * lr_factor
        if self.clip is None and self.loss_scale is None:
            squares = self.norm.squares_here()
            self.optimizer.step()
        else:
            norm = self.norm.whole()
            by = torch.ones_like(norm)
            if self.loss_scale is not None:
                by = by / self.loss_scale.scale
            if self.clip is not None:
                by = by * (self.clip / (norm * by + 1e-6)).clamp(max=1.0)
            finite = self.loss_scale is None or bool(norm.isfinite())
            if finite:
                scale_(self.params, by)
                self.optimizer.step()
            unscaled = norm / self.loss_scale.scale if self.loss_scale is not None else norm
            squares = unscaled.square() if self.rank == 0 else None
            if self.loss_scale is not None:
                self.loss_scale.update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        return squares

    def _sync_if(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel once a step, with the last micro-batch."""
        if isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext() if last else self.model.no_sync()
        set_sync = getattr(self.model, "set_requires_gradient_sync", None)
        if set_sync is not None:  # FSDPModule, which takes 0.7 s to import
            set_sync(last)
        return contextlib.nullcontext()

    def _share(self, loss: Tensor, items: Tensor | float, squares: Tensor | None, wishes: Wishes, expected: float | None) -> Pending:
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        sums[0] = loss
        sums[1] = items
        if squares is not None:
            sums[2] = squares
        if wishes.stop:
            sums[3] = 1.0
        if wishes.save:
            sums[4] = 1.0
        work = dist.all_reduce(sums, async_op=True) if self.ranks > 1 else None
        if self.device.type != "cuda":
            return Pending(sums, expected, work, None)
        if work is not None:
            work.wait()  # orders the streams; the host goes on
        on_host = torch.empty(5, dtype=torch.float64, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Pending(on_host, expected, None, copied)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Weights stay float32 under every plan, and torch casts them by operation: so the plans agree."""
    if precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[precision])
    return contextlib.nullcontext()


def call(task: Task, model: nn.Module, batch: Batch) -> object:
    inputs = task.inputs(batch)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def weighed_loss(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
    """Loss × items of a batch, summed, and its items (the sum of their weights where the task has weights)."""
    output = call(task, model, batch)
    return weighed(task, task.loss(output, batch), task.weights(batch), batch, "loss()")


def weighed(task: Task, values: Tensor, weights: Tensor | None, batch: Batch, what: str) -> tuple[Tensor, Tensor | float]:
    """The sum of values × weights, and that of the weights. A scalar is the mean over the samples of its batch."""
    if not isinstance(values, Tensor):
        raise TaskError(f"{what} must return a tensor, got {type(values).__name__}")
    if values.dim() == 0:
        count = weights.sum() if weights is not None else float(samples_of(batch))
        return values * count, count
    if weights is None:
        return values.sum(), float(values.numel())
    if weights.shape != values.shape:
        raise TaskError(f"weights() must have the shape of what {what} returns, {tuple(values.shape)}, got {tuple(weights.shape)}")
    return (values * weights).sum(), weights.sum()


def samples_of(batch: Batch) -> int:
    """Samples of a batch: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


class GlobalWeight:
    """The weight of the global batch, added up over the ranks while the first forward pass runs."""

    def __init__(self, task: Task, batches: Sequence[Batch]):
        weights = [task.weights(batch) for batch in batches]
        if any(weight is None for weight in weights):
            raise TaskError("weights() must return a tensor for every batch, or not be defined")
        self._sum = torch.stack([weight.sum().double() for weight in weights if weight is not None]).sum()
        self._work = dist.all_reduce(self._sum, async_op=True) if dist.get_world_size() > 1 else None

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._sum

"""The first loss of a training, looked at: what it is made of, and whether it mixes the samples of a batch.

A plan that divides the batch computes the loss of each part alone. That is the loss of the whole batch only where the parts add up.
So the loss of a part of the output is compared with that part of the loss. Where that does not tell, because the model computes
the loss itself, or it does not add up, the model runs on parts of the batch as in an evaluation, and the losses of these are compared.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.data.loader import Batch, cast_floats
from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.rng import seeded_rngs
from paceline.errors import TaskError
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task
from paceline.training.step import TrainingStep

Verdict = Literal["adds up", "mixes", "unknown"]
Take = Callable[[Any], Any]
RTOL = 1e-5  # of losses in float64
RTOL_OF = {torch.float64: 1e-5, torch.float32: 1e-4}  # of losses and models as they are; coarser types:
RTOL_OF_MODEL = {"fp64": 1e-5, "fp32": 1e-3}
RTOL_COARSE = 3e-2
CLEARLY = (
    0.1  # of how far parts of an output were off, that parts of the batch may be so that the latter count
)
ROUNDING = 1e-6
ORDERS = (
    "samples first",
    "views first",
    "second dim",
)  # how a tensor may be laid out whose first dimension is not that of the samples


def check_values(values: Tensor) -> None:
    """Raise TaskError for what cannot be a loss."""
    if not isinstance(values, Tensor):
        raise TaskError(f"loss() must return a tensor, got {type(values).__name__}")
    if not values.is_floating_point():
        raise TaskError(
            f"loss() must return a real floating-point tensor, got {str(values.dtype).removeprefix('torch.')}"
        )
    if not values.requires_grad:
        raise TaskError(
            "loss() returned a tensor that does not require grad, so that nothing would be trained; compute it from the output of the "
            "model, without detach(), item() or torch.no_grad()"
        )


def check_items(values: Tensor, samples: int, method: str, what: str) -> None:
    """Raise TaskError for values that are not by item."""
    if values.dim() and (values.numel() == 0 or values.numel() % samples):
        raise TaskError(
            f"{method} returned {values.numel()} values of {what} for a batch of {samples} samples; return one or more for each sample, "
            f"and where the number of items varies, define weights(batch) of the shape of {what}"
        )


class FirstLoss:
    """Called with the first output of a training, its batch and its loss; `finish` is called after the first update, on all ranks,
    or on a worker of a parameter server after its first gradients.

    samples: of a micro-batch here. `divided`: whether the plan divides the batch. `allow`: whether a loss may mix samples all the same.
    `of_worker`: the plan of a parameter server, of which each worker decides by itself; else all ranks decide together."""

    def __init__(
        self,
        step: TrainingStep,
        samples: int,
        divided: bool,
        allow: bool,
        of_worker: ResolvedPlan | None = None,
    ):
        self.step, self.samples, self.plan, self.together = (
            step,
            samples,
            of_worker or step.plan,
            of_worker is None,
        )
        self.compares = divided and not allow
        self.batch: Batch | None = None
        self.verdict: Verdict = "adds up"
        self.error: TaskError | None = None
        self.is_sure = False  # that tensors were cut as they should be
        self.off = 0.0  # how far the parts were from the whole, relative
        self.apart = ""

    def __call__(self, output: object, batch: Batch, values: Tensor) -> None:
        self.step.on_first_loss = None
        check_values(values)
        if type(self.step.task).weights is Task.weights:
            try:
                check_items(values, self.samples, "loss()", "the loss")
            except (
                TaskError
            ) as error:  # their number may be right on other ranks, which would wait for this one
                if not values.numel():
                    raise
                self.error = error
        if not self.compares or self.error is not None:
            return
        with torch.no_grad(), _as_it_was(self.step.device):
            self.verdict = self._of_output(output, batch)
        self.batch = batch

    def _of_output(self, output: object, batch: Batch) -> Verdict:
        output = _whole(output)
        samples = self.samples
        if samples == 1:  # it has no parts, but it is half of itself twice
            output, batch = _map(
                (output, batch), lambda item: torch.cat([item, item]) if _has(item, 1, 0) else item
            )
            samples = 2
        found: Verdict
        try:
            found = self._parts_of_output(
                cast_floats(output, torch.float64), cast_floats(batch, torch.float64), samples, RTOL
            )
        except Exception:  # a task that cannot compute in float64
            found = "unknown"
        if found == "unknown":
            try:
                found = self._parts_of_output(output, batch, samples, None)
            except Exception:  # the real call of loss() says what is wrong
                return "unknown"
        alone = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        rows = [leaf for leaf in tree_leaves((output, batch)) if isinstance(leaf, Tensor) and leaf.dim()]
        self.is_sure = found == "mixes" and all(len(leaf) == samples for leaf in rows)
        if found == "adds up" and not all(_has(leaf, samples, 0) or _has(leaf, samples, 1) for leaf in alone):
            return "unknown"  # the model may have mixed them itself
        return found

    def _parts_of_output(self, output: Any, batch: Any, samples: int, rtol: float | None) -> Verdict:
        exact = rtol is not None
        whole = self._loss(output, batch, 0, exact)
        if not _near(whole, self._loss(output, batch, 1, exact), rtol):
            return "unknown"  # it draws at random
        found: Verdict = "unknown"
        for order in ORDERS:
            verdicts = [
                self._compare(whole, output, batch, cut, samples, order, rtol) for cut in _cuts(samples)
            ]
            if "mixes" not in verdicts and "adds up" in verdicts:
                return "adds up"
            if "mixes" in verdicts:
                found = "mixes"
        return found

    def _compare(
        self, whole: "_Loss", output: Any, batch: Any, cut: int, samples: int, order: str, rtol: float | None
    ) -> Verdict:
        takes = _takes(samples, cut, order)
        try:
            parts = [self._loss(take(output), take(batch), 0, rtol is not None) for take in takes]
        except Exception:  # of parts that are none: this is not how it is laid out
            return "unknown"
        return self._judge(whole, parts, takes, (cut, samples - cut), samples, rtol)

    def _loss(self, output: Any, batch: Any, seed: int, exact: bool) -> "_Loss":
        task = self.step.task
        plain = torch.autocast(self.step.device.type, enabled=False) if exact else contextlib.nullcontext()
        with seeded_rngs(seed), plain:
            output, batch = _map(
                (output, batch), lambda item: item.clone() if isinstance(item, Tensor) else item
            )
            return _Loss(_whole(task.loss(output, batch)), task.weights(batch))

    def _judge(
        self,
        whole: "_Loss",
        parts: "list[_Loss]",
        takes: list[Take],
        sizes: tuple[int, int],
        samples: int,
        rtol: float | None,
    ) -> Verdict:
        if not whole.is_finite:
            return "unknown"
        total, count = whole.total(samples)
        totals = [part.total(size) for part, size in zip(parts, sizes, strict=True)]
        together, items = sum(part for part, _ in totals), sum(items for _, items in totals)
        off = max(_off(total, together, whole.scale), _off(count, items, count))
        if whole.values.dim():
            slices = [(take(whole.values), part.values) for take, part in zip(takes, parts, strict=True)]
            if all(expected.shape == found.shape for expected, found in slices):
                off = max(off, *(_all_off(expected, found) for expected, found in slices))
        if off <= (rtol if rtol is not None else RTOL_OF.get(whole.values.dtype, RTOL_COARSE)):
            return "adds up"
        self.off = off
        self.apart = (
            f"{total / count:.6g} for the whole and {together / items:.6g} for its parts"
            if count and items
            else ""
        )
        return "mixes"

    def finish(self) -> None:
        """Raise TaskError on all ranks where the loss is not by sample or mixes samples. A collective."""
        if self._any(self.error is not None):
            raise self.error or TaskError(
                "loss() returned values on another rank whose number is not one of its samples; where the number of items varies, "
                "define weights(batch) of the shape of the loss"
            )
        if not self.compares:
            return
        verdict, apart = self.verdict, self.apart
        asks_model = self._any(verdict != "adds up" and not self.is_sure)
        if asks_model and self.step.pipeline is None and self.batch is not None:
            # What the parts of an output say may be wrong where another tensor has as many rows; then those of the batch say otherwise.
            rtol = (
                RTOL_OF_MODEL.get(self.step.precision, RTOL_COARSE)
                if verdict != "mixes"
                else max(CLEARLY * self.off, ROUNDING)
            )
            of_model = self._of_model(self.batch, rtol)
            if of_model != "unknown" and not self.is_sure:
                verdict, apart = of_model, self.apart
        self.batch = None
        if self._any(verdict == "mixes"):
            apart = f" ({apart})" if apart and verdict == "mixes" else ""
            raise TaskError(
                f"loss() mixes the samples of a batch: its mean over a batch is not that over the parts of the batch{apart}, so that plan "
                f"{self.plan} trains otherwise than one process; return the loss of each sample, define weights(batch) where the "
                "number of items varies, use a plan that does not divide the batch (dp=1 and one micro-batch), or accept the loss of "
                "each part with --allow-local-loss"
            )

    def _any(self, here: bool) -> bool:
        """Whether it is so on any rank that decides with this one."""
        return _any(here, self.step.device) if self.together else here

    def _of_model(self, batch: Batch, rtol: float) -> Verdict:
        """As in an evaluation, where dropout is off and BatchNorm does not mix."""
        if self.samples < 2:
            return "unknown"
        cut = self.samples // 2
        takes = _takes(self.samples, cut, ORDERS[0])
        modes = [(module, module.training) for module in self.step.model.modules()]
        self.step.model.eval()
        try:
            with torch.no_grad(), _as_it_was(self.step.device):
                whole, again = self._pass(batch, 0), self._pass(batch, 1)
                parts = [self._pass(take(batch), 0) for take in takes]
        finally:
            for module, mode in modes:
                module.training = mode
        found = [part for part in parts if part is not None]
        if (
            whole is None
            or again is None
            or len(found) < len(parts)
            or not _near(whole, again, max(rtol, RTOL))
        ):
            return "unknown"
        return self._judge(whole, found, takes, (cut, self.samples - cut), self.samples, rtol)

    def _pass(self, batch: Batch, seed: int) -> "_Loss | None":
        with seeded_rngs(seed):
            output = self.step.output(batch)
        try:
            return self._loss(_whole(output), batch, seed, exact=False)
        except Exception:  # a loss that knows training alone
            return None


@dataclasses.dataclass
class _Loss:
    values: Tensor
    weights: Tensor | None

    @property
    def is_finite(self) -> bool:
        return bool(self.values.isfinite().all())

    @property
    def scale(self) -> float:
        """Of the terms of the sum."""
        return float(self.values.abs().sum()) if self.values.dim() else 0.0

    def total(self, samples: int) -> tuple[float, float]:
        """Loss × items, and items."""
        if self.weights is None:
            count = float(self.values.numel()) if self.values.dim() else float(samples)
            return float(self.values.double().sum()) * (count if not self.values.dim() else 1.0), count
        if not self.values.dim():
            return float(self.values) * float(self.weights.sum()), float(self.weights.sum())
        return float((self.values.double() * self.weights).sum()), float(self.weights.double().sum())


def _off(one: float, other: float, scale: float) -> float:
    largest = max(abs(one), abs(other), scale)
    return abs(one - other) / largest if largest else 0.0


def _all_off(one: Tensor, other: Tensor) -> float:
    largest = max((float(each.abs().max()) for each in (one, other) if each.numel()), default=0.0)
    return float((one - other).abs().max()) / largest if largest else 0.0


def _near(one: _Loss, other: _Loss, rtol: float | None) -> bool:
    bound = rtol if rtol is not None else RTOL_OF.get(one.values.dtype, RTOL_COARSE)
    return (
        one.values.shape == other.values.shape
        and _all_off(one.values.nan_to_num(), other.values.nan_to_num()) <= bound
    )


def _cuts(samples: int) -> list[int]:
    """Where a batch is cut in two."""
    return sorted({samples // 2, max(1, samples // 4)})


def _takes(samples: int, cut: int, order: str) -> list[Take]:
    """The two parts of whatever belongs to a batch."""

    def take(begin: int, end: int) -> Take:
        return lambda tree: _map(
            tree, lambda item: _part(item, begin, end, samples, order), samples, (begin, end)
        )

    return [take(0, cut), take(cut, samples)]


def _part(item: Any, begin: int, end: int, samples: int, order: str) -> Any:
    if isinstance(item, np.ndarray):
        return item[begin:end] if item.ndim and len(item) == samples else item
    if not isinstance(item, Tensor):
        return item
    if order == ORDERS[2] and item.dim() > 1 and item.shape[1] == samples:
        return item[:, begin:end]
    if not _has(item, samples, 0):
        return item
    if order == ORDERS[1]:
        return item.unflatten(0, (-1, samples))[:, begin:end].flatten(0, 1)
    each = len(item) // samples
    return item[begin * each : end * each]


def _has(item: Any, samples: int, dim: int) -> bool:
    """Whether a dimension is that of the samples, or of several items of each."""
    if not isinstance(item, Tensor) or item.dim() <= dim or not item.shape[dim]:
        return False
    return item.shape[dim] == samples or (dim == 0 and samples > 1 and item.shape[0] % samples == 0)


def _map(
    tree: Any, of: Callable[[Any], Any], samples: int | None = None, part: tuple[int, int] = (0, 0)
) -> Any:
    """The same of all leaves; of a list with an element for each sample, its part."""

    def again(item: Any) -> Any:
        return _map(item, of, samples, part)

    if isinstance(tree, Mapping):
        new: Any = copy.copy(tree)
        for key in tree:
            new[key] = again(tree[key])
        return new
    if isinstance(tree, (list, tuple)):
        if len(tree) == samples and not any(_has(item, samples, 0) for item in tree_leaves(list(tree))):
            return tree[slice(*part)]
        made = [again(item) for item in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: again(getattr(tree, name)) for name in fields})
    return of(tree)


def _whole(tree: Any) -> Any:
    """Tensors as one process has them, without their graph."""

    def whole(item: Any) -> Any:
        if is_dtensor(item):
            item = item.full_tensor()
        return item.detach() if isinstance(item, Tensor) else item

    return _map(tree, whole)


@contextlib.contextmanager
def _as_it_was(device: torch.device) -> Iterator[None]:
    """What the device draws from is afterwards as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _any(here: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    told = torch.tensor(int(here), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)

"""A loss over all samples of the global batch, such as a contrastive loss.

Each data rank gathers the outputs of all ranks and computes the loss of the whole batch. It keeps the
gradient with respect to the outputs of its own samples, and starts its backward pass with it. So nothing is
sent in the backward pass of the loss. With micro-batches, a first pass without gradients computes all
outputs, and a second pass repeats each micro-batch for its backward pass (Gao et al., Scaling deep
contrastive learning batch size under memory limited setup, 2021).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.batch import find_leaves, map_leaves
from paceline.data.fake import is_close, is_fake
from paceline.data.loader import Batch
from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.rng import seed_torch
from paceline.errors import PlanError, TaskError
from paceline.parallel.forward import autocast, has_global_loss
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task
from paceline.torch_compat import all_gather_single
from paceline.user_code import UserCode

Gradients = list[Tensor | None]  # of the leaves of an output
# The first dim counts the samples; no dim does; the first dim does, but sizes of rows differ between ranks.
TensorKind = Literal["samples", "shared", "ragged"]
RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}  # of outputs that should be equal
COARSE_RTOL = 3e-2  # for other dtypes
OUTPUT, BATCH = "output of the model", "batch"
NOT_TRAINED = (
    "global_loss() returned a tensor that does not depend on the trained parameters; compute it from the "
    "output of the model, without detach(), item() or torch.no_grad()"
)


def check_global_loss(task: Task, plan: ResolvedPlan) -> None:
    """Raise PlanError if the task has a global loss that `plan` cannot compute."""
    if not has_global_loss(task) or (plan.pp == 1 and not plan.is_asynchronous):
        return
    reason = (
        "a pipeline computes the loss of one micro-batch at a time"
        if plan.pp > 1
        else "its ranks update their weights separately"
    )
    raise PlanError(
        f"plan {plan} cannot compute global_loss() of {type(task).__name__}: {reason}; "
        "use single, ddp, zero1, zero2, zero3, hsdp, tp or cp"
    )


@dataclass(frozen=True)
class BatchShares:
    """How the samples of a global batch are divided.

    counts        number of samples of a micro-batch, by data rank
    microbatches  number of micro-batches
    rank          this data rank
    group         ranks with the same part of the model, in the order of `counts`; None: all
    """

    counts: tuple[int, ...]
    microbatches: int
    rank: int
    group: dist.ProcessGroup | None

    @property
    def own(self) -> int:
        """Samples of a micro-batch on this rank."""
        return self.counts[self.rank]

    @property
    def parts(self) -> int:
        """Number of parts of the batch."""
        return len(self.counts) * self.microbatches

    @property
    def samples(self) -> int:
        """Samples of the global batch."""
        return sum(self.counts) * self.microbatches

    def own_rows(self, microbatch: int) -> slice:
        """Return the rows of a micro-batch of this rank among those of the global batch."""
        begin = microbatch * sum(self.counts) + [0, *accumulate(self.counts)][self.rank]
        return slice(begin, begin + self.own)

    def gather(self, microbatches: Sequence[Tensor]) -> Tensor:
        """Return the rows of the global batch, in the order of one process. A collective.

        microbatches: their rows on this rank.
        """
        rows = torch.cat(list(microbatches)) if self.microbatches > 1 else microbatches[0]
        if len(self.counts) == 1:
            return rows
        largest = max(self.counts) * self.microbatches
        if len(rows) < largest:
            rows = torch.cat([rows, rows.new_zeros((largest - len(rows), *rows.shape[1:]))])
        sent = rows.contiguous().reshape(-1).view(torch.uint8)  # since back ends lack some dtypes
        received = sent.new_zeros(len(self.counts) * len(sent))
        all_gather_single(received, sent, group=self.group)
        by_rank = received.view(rows.dtype).reshape(len(self.counts), *rows.shape)
        if self.microbatches == 1 and len({*self.counts}) == 1:
            return by_rank.flatten(0, 1)
        return torch.cat(
            [
                by_rank[rank, microbatch * count : (microbatch + 1) * count]
                for microbatch in range(self.microbatches)
                for rank, count in enumerate(self.counts)
            ]
        )


@dataclass
class WholeTensor:
    """A tensor of an output or batch, of the whole global batch.

    parts: by micro-batch of this rank. kind: of all ranks. with_grad: whether gradients with respect to it
    are needed. what: what it belongs to. checks: whether to check it on all ranks.
    """

    parts: Sequence[Tensor]
    shares: BatchShares
    kind: TensorKind
    with_grad: bool
    what: str
    checks: bool
    is_used: bool = field(default=False, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`, without gathering it."""
        first = self.parts[0]
        return (self.shares.samples, *first.shape[1:]) if self.kind == "samples" else tuple(first.shape)

    @cached_property
    def data(self) -> Tensor:
        """The whole tensor, a leaf of the autograd graph. Gathered at the first use: a collective."""
        self.is_used = True
        whole = self.parts[0]
        if self.kind == "ragged":
            self._refuse("has rows of different sizes on ranks; pad with paceline.Ragged")
        if self.shares.parts > 1:
            whole = self.shares.gather(self.parts) if self.kind == "samples" else self._same_in_all_parts()
        if self.checks and self.kind == "samples" and self._is_ambiguous(whole):
            self._refuse(
                "is the same for all parts of the batch, so that its first dim may not count the samples; "
                "use another batch size"
            )
        return whole.requires_grad_(self.with_grad and (whole.is_floating_point() or whole.is_complex()))

    def _same_in_all_parts(self) -> Tensor:
        """Return a tensor that does not depend on the samples, such as a temperature."""
        first = self.parts[0]
        why = (
            f"does not have a row for each of the {self.shares.own} samples; return a tensor with a row for "
            "each sample"
        )
        if self.what == BATCH:
            self._refuse(why)
        if self.checks and not is_fake(first):
            ranks = len(self.shares.counts)
            shares = BatchShares((1,) * ranks, len(self.parts), self.shares.rank, self.shares.group)
            others = shares.gather([part[None] for part in self.parts])
            if not all(_is_close(other, first) for other in others):
                self._refuse(why)
        return first

    def _is_ambiguous(self, whole: Tensor) -> bool:
        """Return whether rows differ within a part of the batch, but parts do not differ."""
        shares = self.shares
        if shares.parts == 1 or shares.own < 2 or len({*shares.counts}) > 1 or is_fake(whole):
            return False
        parts = whole.unflatten(0, (shares.parts, shares.own))
        return bool((parts == parts[:1]).all()) and not bool((parts[0] == parts[0, :1]).all())

    def _refuse(self, why: str) -> NoReturn:
        shape = tuple(self.parts[0].shape)
        raise TaskError(
            f"global_loss() reads a tensor of the {self.what}, of shape {shape} on this rank, which {why}"
        )

    def own_gradient(self, gradient: Tensor, microbatch: int) -> Tensor:
        """Return the part of a micro-batch of this rank in `gradient`. The parts add up to it."""
        if self.kind == "samples":
            return gradient[self.shares.own_rows(microbatch)]
        return gradient / self.shares.parts


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    return is_close(actual, expected, RTOL.get(expected.dtype, COARSE_RTOL), equal_nan=True)


METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    }
)


class GatheredTensor(Tensor):
    """Stands for a tensor of the global batch, which is gathered when an operation first uses it."""

    whole: WholeTensor

    @staticmethod
    def stand_for(whole: WholeTensor) -> "GatheredTensor":
        first = whole.parts[0]
        stand_in: GatheredTensor = Tensor._make_wrapper_subclass(
            GatheredTensor, whole.shape, dtype=first.dtype, device=first.device
        )
        stand_in.whole = whole
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return function(*_gather_all(args), **_gather_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it for tensors without one
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_gather_all(args), **_gather_all(kwargs or {}))


def _gather_all(arguments: Any) -> Any:
    return tree_map_only(GatheredTensor, lambda tensor: tensor.whole.data, arguments)


class UnreadableItem:
    """Takes the place of an item that cannot be combined over parts of a batch. Any use raises TaskError."""

    def __init__(self, item: Any, what: str):
        self._paceline = (type(item).__name__, what)

    def _refuse(self, *_: Any) -> Any:
        kind, what = object.__getattribute__(self, "_paceline")
        raise TaskError(
            f"global_loss() reads an item of the {what} of type {kind}, which has no value for the global "
            "batch; return a tensor with a row for each sample"
        )

    __getattr__ = __len__ = __iter__ = __getitem__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


class GlobalLoss:
    """The global loss of a task. `shares`: how the plan divides the batches of a training."""

    def __init__(self, task: Task, shares: BatchShares, precision: str, device: torch.device):
        self.task, self.shares, self.precision, self.device = task, shares, precision, device
        self._kinds: dict[tuple[str, bool], list[TensorKind]] = {}
        self._shapes_vary = type(task).collate is not Task.collate

    def evaluate(self, output: Any, batch: Batch, counts: Sequence[int], seed: int) -> Tensor:
        """Return the loss of a batch of an evaluation. A collective.

        counts: samples by data rank. A rank without samples passes the output of any sample. seed: of the
        random draws in the loss.
        """
        shares = BatchShares(tuple(counts), 1, self.shares.rank, self.shares.group)
        loss, _ = self._call([output], [batch], shares, seed, with_grad=False, checks=False)
        return loss

    def differentiate(
        self,
        outputs: Sequence[Any],
        batches: Sequence[Batch],
        start: Callable[[Tensor], Tensor],
        seed: int,
        checks: bool,
    ) -> tuple[Tensor, list[Gradients]]:
        """Return the loss, and by micro-batch its gradients with respect to the leaves of the output.

        A collective. outputs: of the micro-batches of this rank. start: returns the gradient with respect to
        the loss. seed: of the random draws in the loss. checks: whether to check tensors on all ranks. Raises
        TaskError.
        """
        with torch.enable_grad():
            loss, leaves = self._call(outputs, batches, self.shares, seed, with_grad=True, checks=checks)
        if not loss.requires_grad:
            raise TaskError(NOT_TRAINED)
        used = [leaf for leaf in leaves if leaf is not None and leaf.is_used and leaf.data.requires_grad]
        with UserCode("the backward pass", self.task.global_loss):
            found = torch.autograd.grad(loss, [leaf.data for leaf in used], start(loss), allow_unused=True)
        gradients = {id(leaf): gradient for leaf, gradient in zip(used, found, strict=True)}

        def own_gradient(leaf: WholeTensor | None, microbatch: int) -> Tensor | None:
            gradient = gradients.get(id(leaf))
            return leaf.own_gradient(gradient, microbatch) if leaf and gradient is not None else None

        return loss.detach(), [[own_gradient(leaf, at) for leaf in leaves] for at in range(len(outputs))]

    def _call(
        self,
        outputs: Sequence[Any],
        batches: Sequence[Batch],
        shares: BatchShares,
        seed: int,
        with_grad: bool,
        checks: bool,
    ) -> tuple[Tensor, list[WholeTensor | None]]:
        output, leaves = self._combine(outputs, shares, with_grad, OUTPUT, checks)
        batch = batches[0] if shares.parts == 1 else self._combine(batches, shares, False, BATCH, checks)[0]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), autocast(self.precision, self.device):
            seed_torch(seed, self.device)  # all ranks draw the same
            with UserCode("global_loss()", self.task.global_loss):
                loss: Any = self.task.global_loss(output, batch)
        _check_scalar(loss)
        return loss, leaves

    def _combine(
        self, parts: Sequence[Any], shares: BatchShares, with_grad: bool, what: str, checks: bool
    ) -> tuple[Any, list[WholeTensor | None]]:
        """Return the combination of all parts of the batch, and its tensors; None for other leaves.

        parts: by micro-batch of this rank.
        """
        by_leaf = list(zip(*(find_leaves(part) for part in parts), strict=True))
        tensors = [leaf[0] for leaf in by_leaf if isinstance(leaf[0], Tensor)]
        kinds = iter(self._agree_on_kinds(tensors, shares, what))
        leaves: list[WholeTensor | None] = []
        stand_ins: list[Any] = []
        for leaf in by_leaf:
            first = leaf[0]
            if isinstance(first, Tensor):
                kind = next(kinds)
                own = [tensor.detach() for tensor in leaf]
                if kind == "samples" and not shares.own:  # the sample of a rank without samples
                    own = [tensor[:0] for tensor in own]
                whole = WholeTensor(own, shares, kind, with_grad, what, checks)
                leaves.append(whole)
                stand_ins.append(whole.data if shares.parts == 1 else GatheredTensor.stand_for(whole))
            else:
                leaves.append(None)
                is_plain = first is None or (shares.parts == 1 and isinstance(first, (bool, int, float, str)))
                stand_ins.append(first if is_plain else UnreadableItem(first, what))
        remaining = iter(stand_ins)
        return map_leaves(lambda _: next(remaining), parts[0]), leaves

    def _agree_on_kinds(self, tensors: Sequence[Tensor], shares: BatchShares, what: str) -> list[TensorKind]:
        """Return the kinds of the tensors, the same on all ranks. A collective, when it is called first.

        With `collate` of the task, whose batches may differ in their shapes, it is a collective in each call.
        """
        key = (what, shares is self.shares)
        if key not in self._kinds or self._shapes_vary:
            ranks = len(shares.counts)
            fewest, minus_most = self._minimum([[len(tensors), -len(tensors)]], ranks, shares.group)[0]
            if fewest != -minus_most:
                raise TaskError(
                    f"global_loss() cannot combine the {what}: it has {len(tensors)} tensors on this rank "
                    "and another number on other ranks; stack the tensors of the samples"
                )
            rows = [_describe_rows(tensor, shares.own or 1) for tensor in tensors]
            self._kinds[key] = [
                "shared" if not has_rows else "samples" if fewest == -minus_most else "ragged"
                for has_rows, fewest, minus_most in self._minimum(rows, ranks, shares.group)
            ]
        return self._kinds[key]

    def _minimum(
        self, rows: Sequence[Sequence[int]], ranks: int, group: dist.ProcessGroup | None
    ) -> list[list[int]]:
        """Return the smallest of the numbers of all ranks, one by one. A collective."""
        if ranks == 1 or not rows:
            return [list(row) for row in rows]
        numbers = torch.tensor(rows, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
        minimum: list[list[int]] = numbers.tolist()
        return minimum


def _describe_rows(tensor: Tensor, samples: int) -> tuple[int, int, int]:
    """Return whether a tensor has a row for each sample, and the size of a row as it is and negative."""
    if not tensor.dim() or len(tensor) != samples:
        return 0, 0, 0
    size = math.prod(tensor.shape[1:])
    return 1, size, -size


def _check_scalar(loss: Any) -> None:
    """Raise TaskError if `loss` cannot be a global loss."""
    if isinstance(loss, Mapping):
        raise TaskError("global_loss() must return one number, got a dict; return the sum of its losses")
    if not isinstance(loss, Tensor):
        raise TaskError(f"global_loss() must return a tensor, got {type(loss).__name__}")
    if loss.dim():
        raise TaskError(
            f"global_loss() must return one number, got a tensor of shape {tuple(loss.shape)}; return its "
            "mean"
        )
    if not loss.is_floating_point():
        dtype = str(loss.dtype).removeprefix("torch.")
        raise TaskError(f"global_loss() must return a real floating-point tensor, got {dtype}")


def gather_splits(output: Any) -> Any:
    """Return an output with whole tensors in place of tensors that are split over ranks."""
    return map_leaves(lambda leaf: leaf.full_tensor() if is_dtensor(leaf) else leaf, output)


def find_gradients(output: Any, gradients: Gradients) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the tensors of an output that have a gradient, and these. Raises TaskError if there are none."""
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(find_leaves(output), gradients, strict=True)
        if gradient is not None and leaf.requires_grad
    ]
    if not pairs:
        raise TaskError(NOT_TRAINED)
    tensors, found = zip(*pairs, strict=True)
    return tensors, found


def check_repeated(output: Any, repeated: Any) -> None:
    """Raise TaskError if the second pass of a micro-batch has another output than the first."""
    for first, second in zip(find_leaves(output), find_leaves(repeated), strict=True):
        if isinstance(first, Tensor) and not is_fake(first) and not _is_close(second.detach(), first):
            raise TaskError(
                "the model has another output when it repeats a micro-batch, which global_loss() requires; "
                "keep what changes in buffers and draw random numbers only from torch, or use microbatches=1"
            )


@contextlib.contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after this context."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in list(model.named_buffers()):
            if name in buffers:
                buffer.copy_(buffers[name])
            else:  # the buffer was None before
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = None

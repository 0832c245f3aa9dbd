"""A loss over all samples of the global batch, such as a contrastive loss.

Each data rank gathers the outputs of all ranks and computes the loss of the whole batch. The outputs that the
loss reads are gathered in one all-gather: those that the previous loss read. Each rank keeps the
gradient with respect to the outputs of its own samples, and starts its backward pass with it. So nothing is
sent in the backward pass of the loss. With micro-batches, a first pass without gradients computes all
outputs, and a second pass repeats each micro-batch for its backward pass (Gao et al., Scaling deep
contrastive learning batch size under memory limited setup, 2021).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.batch import find_leaves, map_leaves
from paceline.data.fake import is_fake
from paceline.data.samples import Batch
from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.rng import seed_torch
from paceline.errors import PlanError, TaskError
from paceline.parallel.loss.batch_shares import BatchShares
from paceline.parallel.loss.forward import autocast, has_global_loss
from paceline.parallel.loss.whole_tensor import (
    BATCH,
    OUTPUT,
    GatheredTensor,
    TensorKind,
    UnreadableItem,
    WholeTensor,
    gather_together,
    is_equal,
)
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task
from paceline.user_code import UserCode

Gradients = list[Tensor | None]  # of the leaves of an output
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


class GlobalLoss:
    """The global loss of a task. `shares`: how the plan divides the batches of a training."""

    def __init__(self, task: Task, shares: BatchShares, precision: str, device: torch.device):
        self.task, self.shares, self.precision, self.device = task, shares, precision, device
        self._kinds: dict[tuple[str, bool], list[TensorKind]] = {}
        self._used: dict[tuple[str, bool], list[int]] = {}  # indices of the tensors that the last call read
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
        self._used[OUTPUT, True] = [
            index for index in self._used[OUTPUT, True] if gradients.get(id(leaves[index]), loss) is not None
        ]

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
        batch, of_batch = batches[0], list[WholeTensor | None]()
        if shares.parts > 1:
            batch, of_batch = self._combine(batches, shares, False, BATCH, checks)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), autocast(self.precision, self.device):
            seed_torch(seed, self.device)  # all ranks draw the same
            with UserCode("global_loss()", self.task.global_loss):
                loss: Any = self.task.global_loss(output, batch)
        _check_scalar(loss)
        for what, tensors in ((OUTPUT, leaves), (BATCH, of_batch)):
            self._used[what, shares is self.shares] = [
                index for index, tensor in enumerate(tensors) if tensor is not None and tensor.is_used
            ]
        return loss, leaves

    def _combine(
        self, parts: Sequence[Any], shares: BatchShares, with_grad: bool, what: str, checks: bool
    ) -> tuple[Any, list[WholeTensor | None]]:
        """Return the combination of all parts of the batch, and its tensors; None for other leaves.

        parts: by micro-batch of this rank.
        """
        key = (what, shares is self.shares)
        by_leaf = list(zip(*(find_leaves(part) for part in parts), strict=True))
        tensors = [leaf[0] for leaf in by_leaf if isinstance(leaf[0], Tensor)]
        kinds = iter(self._agree_on_kinds(tensors, shares, what))
        leaves: list[WholeTensor | None] = []
        for leaf in by_leaf:
            if not isinstance(leaf[0], Tensor):
                leaves.append(None)
                continue
            kind, own = next(kinds), [tensor.detach() for tensor in leaf]
            if kind == "samples" and not shares.own:  # the sample of a rank without samples
                own = [tensor[:0] for tensor in own]
            leaves.append(WholeTensor(own, shares, kind, with_grad, what, checks))
        used = self._used.get(key, ())
        gather_together(
            [
                whole
                for whole in (leaves[index] for index in used if index < len(leaves))
                if whole is not None and whole.kind == "samples" and whole.device.type == self.device.type
            ]
        )
        stand_ins: list[Any] = []
        for index, (leaf, whole) in enumerate(zip(by_leaf, leaves, strict=True)):
            first = leaf[0]
            if whole is not None:
                # A gradient tells later whether the loss reads a tensor; then operations need no stand-in.
                is_read = with_grad and index in used and first.requires_grad
                stand_ins.append(
                    whole.data if shares.parts == 1 or is_read else GatheredTensor.stand_for(whole)
                )
            else:
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
        if isinstance(first, Tensor) and not is_fake(first) and not is_equal(second.detach(), first):
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

"""Scatter, gather and reduce-scatter for activations that are split over the ranks of a tensor axis.

Each rank has a part of one dimension, in the order of ranks. If the ranks do not divide the dimension, the
last parts are shorter.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten
from torch.utils.hooks import RemovableHandle

from paceline.errors import PlanError
from paceline.parallel.pytree import flatten


def _unchanged(tree: Any) -> None:
    return None


def hook_block(
    block: nn.Module, before: Callable[[Any], Any] = _unchanged, after: Callable[[Any], Any] = _unchanged
) -> list[RemovableHandle]:
    """Replace the arguments of a block by before(arguments), and its output by after(output).

    A function that returns None leaves them unchanged.
    """
    return [
        block.register_forward_pre_hook(lambda _, args, kwargs: before((args, kwargs)), with_kwargs=True),
        block.register_forward_hook(lambda _, args, output: after(output)),
    ]


def map_marked(function: Callable[[Tensor], Tensor], marks: tuple[bool, ...], tree: Any) -> Any:
    """Return `tree` with `function` applied to its marked leaves."""
    leaves, structure = flatten(tree)
    return tree_unflatten(
        [function(leaf) if marked else leaf for leaf, marked in zip(leaves, marks, strict=True)], structure
    )


class SequenceCollectives:
    """The collectives of one pass along dimension `dim`.

    All split activations have one length there, that of the micro-batch or of its sequences.
    """

    def __init__(self, group: dist.ProcessGroup, dim: int):
        self.group, self.dim = group, dim
        self.length = 0  # of whole activations

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this rank's part of activations that every rank has."""
        self.length = whole.shape[self.dim]
        part: Tensor = _ScatterSequence.apply(whole, self)
        return part

    def reduce_scatter(self, summand: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        self.length = summand.shape[self.dim]
        part: Tensor = _ReduceScatterSequence.apply(summand, self)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return whole activations for operations that every rank computes in the same way."""
        self._check_part(part)
        whole: Tensor = _GatherSequence.apply(part, self, self.length)
        return whole

    def gather_for_split(self, part: Tensor) -> Tensor:
        """Return whole activations for split layers, and reduce-scatter their gradient."""
        self._check_part(part)
        whole: Tensor = _EnterSplitSequence.apply(part, self, self.length)
        return whole

    def _check_part(self, part: Tensor) -> None:
        if part.shape[self.dim] != self._span(self.length)[1]:
            raise PlanError(
                f"activations of shape {tuple(part.shape)} are not a part of {self.length} along dimension "
                f"{self.dim}, as they were in the pass that tensor parallelism traced; use a plan without tp"
            )

    def _part_length(self, length: int) -> int:
        return -(-length // self.group.size())

    def _span(self, length: int) -> tuple[int, int]:
        """Return start and length of this rank's part."""
        start = min(self.group.rank() * self._part_length(length), length)
        return start, min(self._part_length(length), length - start)

    def local_part(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, *self._span(whole.shape[self.dim])).clone(
            memory_format=torch.contiguous_format
        )

    def all_gather_parts(self, part: Tensor, length: int) -> Tensor:
        ranks, part = self.group.size(), self._pad(part, self._part_length(length)).contiguous()
        whole = part.new_empty(ranks * part.shape[0], *part.shape[1:])
        dist.all_gather(list(whole.chunk(ranks)), part, group=self.group)
        return self._shorten(torch.cat(whole.chunk(ranks), self.dim) if self.dim else whole, length)

    def reduce_scatter_parts(self, whole: Tensor) -> Tensor:
        ranks, length = self.group.size(), whole.shape[self.dim]
        part_length = self._part_length(length)
        parts = (
            self._pad(whole, part_length * ranks)
            .unflatten(self.dim, (ranks, part_length))
            .movedim(self.dim, 0)
            .contiguous()
        )
        # torch 2.13: gloo's reduce-scatter takes twice the time of an all-reduce
        if whole.device.type == "cpu":
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=self.group)
            part = received.sum(0)
        else:
            part = torch.empty_like(parts[0])
            dist.reduce_scatter(part, list(parts), group=self.group)
        return self._shorten(part, self._span(length)[1])

    def _shorten(self, tensor: Tensor, length: int) -> Tensor:
        """Return the first `length` positions, never as a view: the model may write to them in place."""
        return tensor if tensor.shape[self.dim] == length else tensor.narrow(self.dim, 0, length).clone()

    def _pad(self, tensor: Tensor, length: int) -> Tensor:
        missing = length - tensor.shape[self.dim]
        return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - self.dim) + [0, missing]) if missing else tensor


# The backward of each function below is the forward of its counterpart, so that a task may differentiate
# gradients (torch.autograd.grad with create_graph=True). `length` is that of whole activations.


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, collectives: SequenceCollectives) -> Tensor:
        ctx.collectives, ctx.length = collectives, whole.shape[collectives.dim]
        return collectives.local_part(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherSequence.apply(grad, ctx.collectives, ctx.length), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, collectives: SequenceCollectives, length: int) -> Tensor:
        ctx.collectives = collectives
        return collectives.all_gather_parts(part, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ScatterSequence.apply(grad, ctx.collectives), None, None


class _EnterSplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, collectives: SequenceCollectives, length: int) -> Tensor:
        ctx.collectives = collectives
        return collectives.all_gather_parts(part, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ReduceScatterSequence.apply(grad, ctx.collectives), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, collectives: SequenceCollectives) -> Tensor:
        ctx.collectives, ctx.length = collectives, summand.shape[collectives.dim]
        return collectives.reduce_scatter_parts(summand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _EnterSplitSequence.apply(grad, ctx.collectives, ctx.length), None

"""Activations that are split over the ranks of a tensor axis: how they are cut, gathered, and summed in parts.

Each rank has a piece of one dimension, in the order of ranks; where the ranks do not divide it, the last pieces are shorter.
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
    """Call a block with what `before` makes of its arguments, and let it return what `after` makes of its output; None: as it is."""
    return [
        block.register_forward_pre_hook(lambda _, args, kwargs: before((args, kwargs)), with_kwargs=True),
        block.register_forward_hook(lambda _, args, output: after(output)),
    ]


def map_marked(change: Callable[[Tensor], Tensor], marks: tuple[bool, ...], tree: Any) -> Any:
    """`tree` with some of its leaves changed."""
    leaves, structure = flatten(tree)
    return tree_unflatten(
        [change(leaf) if marked else leaf for leaf, marked in zip(leaves, marks, strict=True)], structure
    )


class SequenceCollectives:
    """The pieces of one pass: all that are cut have one length, which is that of the micro-batch or of its sequences."""

    def __init__(self, group: dist.ProcessGroup, dim: int):
        self.group, self.dim = group, dim
        self.length = 0  # of the whole

    def cut(self, whole: Tensor) -> Tensor:
        """Of what each rank has."""
        self.length = whole.shape[self.dim]
        piece: Tensor = _ScatterSequence.apply(whole, self)
        return piece

    def add(self, summand: Tensor) -> Tensor:
        """The piece of the sum over the ranks."""
        self.length = summand.shape[self.dim]
        piece: Tensor = _ReduceScatterSequence.apply(summand, self)
        return piece

    def gather(self, piece: Tensor) -> Tensor:
        """For what each rank computes in the same way."""
        self._check(piece)
        whole: Tensor = _GatherSequence.apply(piece, self)
        return whole

    def enter(self, piece: Tensor) -> Tensor:
        """For split layers, each of which knows a part of the gradient."""
        self._check(piece)
        whole: Tensor = _EnterSplitSequence.apply(piece, self)
        return whole

    def _check(self, piece: Tensor) -> None:
        if piece.shape[self.dim] != self._span(self.length)[1]:
            raise PlanError(
                f"activations of shape {tuple(piece.shape)} are no piece of {self.length} along dimension {self.dim}, as they were in the "
                "pass that tensor parallelism looked at; use a plan without tp"
            )

    def _step(self, length: int) -> int:
        return -(-length // self.group.size())

    def _span(self, length: int) -> tuple[int, int]:
        """Start and length of this rank's piece."""
        start = min(self.group.rank() * self._step(length), length)
        return start, min(self._step(length), length - start)

    def own(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, *self._span(whole.shape[self.dim])).clone(
            memory_format=torch.contiguous_format
        )

    def all_gather(self, piece: Tensor, length: int) -> Tensor:
        ranks, piece = self.group.size(), self._padded(piece, self._step(length)).contiguous()
        whole = piece.new_empty(ranks * piece.shape[0], *piece.shape[1:])
        dist.all_gather(list(whole.chunk(ranks)), piece, group=self.group)
        return self._shortened(torch.cat(whole.chunk(ranks), self.dim) if self.dim else whole, length)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        ranks, length = self.group.size(), whole.shape[self.dim]
        step = self._step(length)
        parts = (
            self._padded(whole, step * ranks)
            .unflatten(self.dim, (ranks, step))
            .movedim(self.dim, 0)
            .contiguous()
        )
        if (
            whole.device.type == "cpu"
        ):  # gloo's reduce-scatter takes twice the time of an all-reduce (torch 2.13)
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=self.group)
            piece = received.sum(0)
        else:
            piece = torch.empty_like(parts[0])
            dist.reduce_scatter(piece, list(parts), group=self.group)
        return self._shortened(piece, self._span(length)[1])

    def _shortened(self, tensor: Tensor, length: int) -> Tensor:
        """Never a view, which the model could not write to."""
        return tensor if tensor.shape[self.dim] == length else tensor.narrow(self.dim, 0, length).clone()

    def _padded(self, tensor: Tensor, length: int) -> Tensor:
        missing = length - tensor.shape[self.dim]
        return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - self.dim) + [0, missing]) if missing else tensor


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, pieces: SequenceCollectives) -> Tensor:
        ctx.pieces = pieces
        ctx.length = whole.shape[pieces.dim]
        return pieces.own(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pieces.all_gather(grad, ctx.length), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, pieces: SequenceCollectives) -> Tensor:
        ctx.pieces = pieces
        return pieces.all_gather(piece, pieces.length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pieces.own(grad), None


class _EnterSplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, pieces: SequenceCollectives) -> Tensor:
        ctx.pieces = pieces
        return pieces.all_gather(piece, pieces.length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pieces.reduce_scatter(grad), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, pieces: SequenceCollectives) -> Tensor:
        ctx.pieces = pieces
        ctx.length = summand.shape[pieces.dim]
        return pieces.reduce_scatter(summand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pieces.all_gather(grad, ctx.length), None

"""How the arguments of a block are cut along the sequence, found by trying: a part of the positions in, and that part must come out.

Attention mixes positions, and goes round a ring of ranks. Whatever else in a block mixes them (a convolution, a mean) or numbers
them (rotary angles counted from 0 inside of it) would be silently wrong on a slice. So a block is tried once on random weights in
float64, with an attention that leaves each position alone, on all positions and on a shuffled few.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from paceline.data.fake import is_close
from paceline.parallel.context.ring_attention import replace_attention
from paceline.parallel.pytree import flatten

MAX_TRIALS = 256  # ways to cut the arguments; nearly always the first is the right one
RTOL = 1e-5  # parts of a model may compute in float32


@dataclass(frozen=True)
class SequenceSplits:
    """The dim along which each leaf of the arguments and of the output is cut; None: it is left whole."""

    arguments: tuple[int | None, ...]
    structure: TreeSpec
    output: tuple[int | None, ...]


@dataclass
class IdentityAttention:
    """In place of attention: each position sees itself. Neither a rotation of query and key by one angle nor another order of
    positions goes unseen."""

    lengths: set[int] = field(default_factory=set)  # of the sequences it was called with
    dropout: float = 0.0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        self.lengths |= {query.size(-2), key.size(-2)}
        self.dropout = max(self.dropout, dropout_p)
        if query.size(-2) != key.size(-2):
            return query[..., :1] * value.sum(-2, keepdim=True)
        if query.dim() > 2 and query.size(-3) != key.size(-3):  # grouped queries
            key, value = (of.repeat_interleave(query.size(-3) // of.size(-3), -3) for of in (key, value))
        return value * (1 + query.sum(-1, keepdim=True).sin()) + key.sum(-1, keepdim=True).sin()


def find_sequence_splits(
    block: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    length: int | None,
) -> tuple[int | None, SequenceSplits | None]:
    """`arguments`: positional ones and those with names, for sequences of `length` (None: not known yet).

    Returns the length of the sequences that attention ran over in the block (None where it did not), and the cuts; None where the
    block does not treat the positions alone.
    """
    leaves, structure = flatten(arguments)

    def run(leaves: list[Any]) -> tuple[list[Any], set[int]]:
        args, kwargs = tree_unflatten(
            [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves], structure
        )
        alone = IdentityAttention()
        with replace_attention(alone):
            return flatten(forward(*args, **kwargs))[0], alone.lengths

    with _random_weights(block):
        leaves = [
            leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        whole, lengths = run(leaves)
        attended = max(lengths, default=None)
        length = attended if length is None else length
        if length is None or len(lengths) > 1:
            return attended, None
        along = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and length in leaf.shape]
        if not along:
            return attended, None
        hidden = next((at for at in along if leaves[at].is_floating_point()), along[0])
        if leaves[hidden].is_floating_point():
            leaves[hidden] = _random_like(leaves[hidden].shape, leaves[hidden].device)
            whole, _ = run(leaves)
        few = torch.arange(length - 1, -1, -2, device=leaves[hidden].device)  # backwards, every other one
        ways = [_candidate_dims(leaf, length, is_hidden=at == hidden) for at, leaf in enumerate(leaves)]
        for dims in itertools.islice(itertools.product(*ways), MAX_TRIALS):
            parts = [
                leaf if dim is None else leaf.index_select(dim, few)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            try:
                part, seen = run(parts)
            except (RuntimeError, ValueError, IndexError, AssertionError):
                continue  # shapes that do not fit
            output = _match_outputs(whole, part, few)
            if seen == ({len(few)} if attended is not None else set()) and output is not None:
                return attended, SequenceSplits(dims, structure, output)
    return attended, None


def _candidate_dims(leaf: Any, length: int, is_hidden: bool) -> list[int | None]:
    """The dims along which an argument may be cut, the likeliest first."""
    if not isinstance(leaf, Tensor):
        return [None]
    dims: list[int | None] = [dim for dim in range(leaf.dim()) if leaf.size(dim) == length]
    if leaf.dim() > 2 and 1 in dims:
        dims = [1, *(dim for dim in dims if dim != 1)]
    if is_hidden:
        return dims
    is_mask = leaf.dim() > 1 and leaf.shape[-2:] == (length, length)
    return [None, *dims] if is_mask else [*dims, None]


def _match_outputs(whole: list[Any], part: list[Any], few: Tensor) -> tuple[int | None, ...] | None:
    """Along which dims `part` has the positions `few` of `whole`; None where it has not."""
    dims: list[int | None] = []
    for one, other in zip(whole, part, strict=True):
        if not isinstance(one, Tensor):
            dims.append(None)
            continue
        cut = [dim for dim in range(one.dim()) if one.size(dim) != other.size(dim)]
        expected = one.index_select(cut[0], few) if len(cut) == 1 else one
        if not is_close(other, expected, RTOL):
            return None
        dims.append(cut[0] if cut else None)
    return tuple(dims) if any(dim is not None for dim in dims) else None


def _random_like(shape: torch.Size, device: torch.device) -> Tensor:
    """Numbers that depend on nothing but the shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape.numel())).to(
        device
    )


@contextlib.contextmanager
def _random_weights(block: nn.Module) -> Iterator[None]:
    """Weights that hide nothing, as zeros in the output projection of a fresh block would; and float64 throughout."""
    kept: list[tuple[Any, dict[str, Any]]] = [
        (own, dict(own)) for module in block.modules() for own in (module._parameters, module._buffers)
    ]
    try:
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None and weight.is_floating_point():
                    drawn = _random_like(weight.shape, weight.device)
                    value = drawn / weight.size(-1) ** 0.5 if weight.dim() > 1 else 1 + drawn / 2
                    module._parameters[name] = value  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                module._buffers[name] = (
                    buffer.double() if buffer is not None and buffer.is_floating_point() else buffer
                )
        yield
    finally:
        for own, before in kept:
            own.update(before)

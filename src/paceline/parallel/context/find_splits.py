"""A search for the dimensions along which the arguments of a block are sliced, by trial passes.

Attention mixes positions, and sees those of all ranks. Anything else in a block that mixes positions (a
convolution, a mean) or numbers them (rotary angles counted from 0 inside of it) would be silently wrong on a
slice. So each block is tried once with random weights in float64: on all positions, and on some of them in
another order. Queries, keys, masks and the output of the second pass must be a slice of those of the first.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from paceline.data.fake import is_close
from paceline.parallel.context.replace_attention import (
    AttentionHandler,
    replace_attention,
    watch_attention,
)
from paceline.parallel.context.sliced_attention import SlicedTensors
from paceline.parallel.context.trial_attention import RTOL, SlicedTrial, WholeTrial
from paceline.parallel.pytree import flatten

FAILURES = (RuntimeError, ValueError, IndexError, AssertionError, TypeError, AttributeError)
MAX_TRIALS = 256  # ways to slice the arguments; the first is nearly always right


@dataclass(frozen=True)
class SequenceSplits:
    """The dimension along which each leaf of arguments and output is sliced; None: it stays whole."""

    arguments: tuple[int | None, ...]
    structure: TreeSpec
    output: tuple[int | None, ...]
    calls: tuple[SlicedTensors, ...]  # of attention, in their order


def has_attention(forward: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether a block calls attention."""
    args, kwargs = _copy_objects(*flatten(arguments))
    with watch_attention() as calls:
        forward(*args, **kwargs)
    return bool(calls)


def _copy_objects(leaves: list[Any], structure: TreeSpec) -> Any:
    """Return arguments with copies of what a block may change, such as a cache of keys."""
    return tree_unflatten(
        [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves], structure
    )


def find_sequence_splits(
    block: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    length: int | None,
) -> tuple[int | None, SequenceSplits | None]:
    """Return the length of the sequences that attention in a block runs over, and how the block is sliced.

    arguments: args and kwargs.
    length: of their sequences, for a block without attention (None: not known yet).

    The returned length is that of the first queries; None if the block has no attention. The returned splits
    are None if the block does not treat positions independently outside of attention.
    """
    leaves, structure = flatten(arguments)

    def run(leaves: list[Any], attention: AttentionHandler) -> list[Any]:
        args, kwargs = _copy_objects(leaves, structure)
        with replace_attention(attention):
            return flatten(forward(*args, **kwargs))[0]

    with _random_weights(block):
        leaves = [
            leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        recorded = WholeTrial()
        try:
            whole = run(leaves, recorded)
        except FAILURES:  # such as the use of weights, which attention on slices does not return
            return next(iter(recorded.lengths), None), None
        attended = next(iter(recorded.lengths), None)
        length = attended or length
        candidates = [
            index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and length in leaf.shape
        ]
        if length is None or not candidates:
            return attended, None
        hidden = next((index for index in candidates if leaves[index].is_floating_point()), candidates[0])
        if leaves[hidden].is_floating_point():
            leaves[hidden] = _random_like(leaves[hidden].shape, leaves[hidden].device)
            recorded = WholeTrial()
            whole = run(leaves, recorded)
        # every other position, in reverse order
        positions = torch.arange(length - 1, -1, -2, device=leaves[hidden].device)
        choices = [
            _candidate_dims(leaf, length, is_hidden=index == hidden) for index, leaf in enumerate(leaves)
        ]

        def attempt(dims: Sequence[int | None]) -> SequenceSplits | None:
            sliced = [
                leaf if dim is None else leaf.index_select(dim, positions)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            trial = SlicedTrial(recorded.calls, positions, length)
            try:
                part = run(sliced, trial)
            except FAILURES:  # shapes do not match
                return None
            output = _match_outputs(whole, part, positions)
            is_sliced = any(call.query for call in trial.calls) or attended is None
            if not is_sliced or len(trial.calls) != len(recorded.calls) or output is None:
                return None
            return SequenceSplits(tuple(dims), structure, output, tuple(trial.calls))

        attempts = (attempt(dims) for dims in itertools.islice(itertools.product(*choices), MAX_TRIALS))
        splits = next((splits for splits in attempts if splits is not None), None)
        # The keys of cross attention need not be sliced, although they may be as many as the queries here.
        for index, dim in enumerate(splits.arguments if splits is not None else ()):
            if splits is not None and dim is not None and index != hidden:
                dims = [None if at == index else dim for at, dim in enumerate(splits.arguments)]
                splits = attempt(dims) or splits
    return attended, splits


def _candidate_dims(leaf: Any, length: int, is_hidden: bool) -> list[int | None]:
    """Return the dimensions along which an argument may be sliced, the likeliest first."""
    if not isinstance(leaf, Tensor):
        return [None]
    dims: list[int | None] = [dim for dim in range(leaf.dim()) if leaf.size(dim) == length]
    if leaf.dim() > 2 and 1 in dims:
        dims = [1, *(dim for dim in dims if dim != 1)]
    if is_hidden:
        return dims
    # Attention takes the rows of a mask itself.
    is_mask = leaf.dim() > 1 and (
        leaf.shape[-2:] == (length, length)
        or (leaf.dim() > 2 and leaf.shape[-2:] == (1, length))
        or leaf.dtype == torch.bool
    )
    return [None, *dims] if is_mask else [*dims, None]


def _match_outputs(whole: list[Any], part: list[Any], positions: Tensor) -> tuple[int | None, ...] | None:
    """Return along which dimensions `part` equals `whole` at `positions`; None if it does not."""
    dims: list[int | None] = []
    for whole_leaf, part_leaf in zip(whole, part, strict=True):
        if not isinstance(whole_leaf, Tensor):
            dims.append(None)
            continue
        sliced = [dim for dim in range(whole_leaf.dim()) if whole_leaf.size(dim) != part_leaf.size(dim)]
        expected = whole_leaf.index_select(sliced[0], positions) if len(sliced) == 1 else whole_leaf
        if not is_close(part_leaf, expected, RTOL):
            return None
        dims.append(sliced[0] if sliced else None)
    return tuple(dims) if any(dim is not None for dim in dims) else None


def _random_like(shape: torch.Size, device: torch.device) -> Tensor:
    """Return random numbers that depend only on the shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape.numel())).to(
        device
    )


@contextlib.contextmanager
def _random_weights(block: nn.Module) -> Iterator[None]:
    """Give a block random weights in float64.

    The zeros of a fresh output projection, for example, would hide differences.
    """
    previous: list[tuple[Any, dict[str, Any]]] = [
        (tensors, dict(tensors))
        for module in block.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    try:
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None and weight.is_floating_point():
                    random = _random_like(weight.shape, weight.device)
                    value = random / weight.size(-1) ** 0.5 if weight.dim() > 1 else 1 + random / 2
                    module._parameters[name] = value  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                module._buffers[name] = (
                    buffer.double() if buffer is not None and buffer.is_floating_point() else buffer
                )
        yield
    finally:
        for tensors, before in previous:
            tensors.update(before)

"""Rules by which a label, "split along this dimension", propagates through an operation."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Label = tuple[str, int]  # the root layer of a group, and the dimension that would be split
ATEN = torch.ops.aten
SAME_SHAPE = {  # in addition to what torch tags as pointwise
    ATEN.clone,
    ATEN._to_copy,
    ATEN.detach,
    ATEN.alias,
    ATEN.native_dropout,
    ATEN.bernoulli_,
    ATEN.empty_like,
    ATEN.zeros_like,
    ATEN.ones_like,
    ATEN.rand_like,
    ATEN.randn_like,
    ATEN.lift_fresh,
}
VIEWS = {ATEN.view, ATEN._unsafe_view, ATEN.reshape, ATEN._reshape_alias}
# Passes may differ in these operations, which depend on gradients and memory layout.
UNTAPED = {ATEN.detach, ATEN.alias, ATEN.clone}
# (tensor, …, dim): any dimension but `dim` may be split
WITHIN_ONE_DIM = {
    ATEN.slice,
    ATEN.split,
    ATEN.split_with_sizes,
    ATEN._softmax,
    ATEN._log_softmax,
}
NORMS = {ATEN.native_layer_norm, ATEN._fused_rms_norm}
ATTENTION = F.scaled_dot_product_attention
PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}


def is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in getattr(func, "tags", ())


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws random numbers."""
    if func is ATTENTION:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def propagate_split(
    func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor], label: Any
) -> list[int | None] | None:
    """Return the split dimension of each result, or None if the operation cannot run on parts.

    tensors: the arguments that are tensors.
    label: returns the label of a tensor, or None.
    """
    if func is ATTENTION:
        return _propagate_through_attention(args, kwargs, results, label)
    if func in PRODUCTS:
        return _propagate_elementwise(tensors, results, label, least=3)
    packet = func.overloadpacket
    first = tensors[0]
    dim = label(first)[1] if label(first) else None
    if packet in VIEWS and dim is not None:
        return _as_list(_propagate_through_view(tuple(first.shape), tuple(results[0].shape), dim))
    if is_pointwise(func) or packet in SAME_SHAPE:
        return _propagate_elementwise(tensors, results, label, least=1)
    if packet is ATEN.cat:
        along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % first.dim()
        dims = {label(tensor)[1] if label(tensor) else None for tensor in tensors}
        return [dim] if len(dims) == 1 and dim != along else None
    if dim is None:
        return None
    if packet in NORMS:
        ends = first.dim() - len(args[1])
        return [dim if dim < min(ends, result.dim()) else None for result in results] if dim < ends else None
    return _propagate_through_reshape(packet, args, kwargs, first, results, dim)


def _propagate_through_reshape(
    packet: Any, args: Any, kwargs: Any, first: Tensor, results: list[Tensor], dim: int
) -> list[int | None] | None:
    rank = first.dim()
    if packet is ATEN.transpose:
        first_dim, second_dim = args[1] % rank, args[2] % rank
        return [second_dim if dim == first_dim else first_dim if dim == second_dim else dim]
    if packet is ATEN.t:
        return [1 - dim]
    if packet is ATEN.permute:
        return [[at % rank for at in args[1]].index(dim)]
    if packet is ATEN.unsqueeze:
        return [dim + (dim >= args[1] % (rank + 1))]
    if packet is ATEN.squeeze:
        removed = (
            [at % rank for at in ([args[1]] if isinstance(args[1], int) else args[1])]
            if len(args) > 1
            else range(rank)
        )
        removed = [at for at in removed if first.shape[at] == 1]
        return [dim - sum(at < dim for at in removed)] if dim not in removed else None
    if packet is ATEN.expand:
        return [dim + results[0].dim() - rank]
    if packet in (ATEN.select, ATEN.unbind):
        along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % rank
        return [dim - (along < dim)] * len(results) if along != dim else None
    if packet in WITHIN_ONE_DIM:
        at = 2 if packet in (ATEN.split, ATEN.split_with_sizes) else 1
        along = (args[at] if len(args) > at else kwargs.get("dim", 0)) % rank
        return [dim] * len(results) if along != dim else None
    if packet in (ATEN.sum, ATEN.mean) and len(args) > 1 and args[1]:
        removed = [at % rank for at in ([args[1]] if isinstance(args[1], int) else args[1])]
        keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return [dim - (0 if keep else sum(at < dim for at in removed))] if dim not in removed else None
    return None


def _as_list(dim: int | None) -> list[int | None] | None:
    return None if dim is None else [dim]


def attention_inputs(args: Any, kwargs: Any) -> list[Tensor]:
    """Return query, key and value of a call of ATTENTION."""
    return [args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key", "value"))]


def _propagate_through_attention(
    args: Any, kwargs: Any, results: list[Tensor], label: Any
) -> list[int | None] | None:
    """Query, key and value, (…, heads, positions, size), must all be split along the heads."""
    q, k, v = attention_inputs(args, kwargs)
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    split = {label(tensor)[1] - tensor.dim() if label(tensor) else None for tensor in (q, k, v)}
    if split != {-3} or (mask is not None and mask.dim() >= 3 and mask.shape[-3] != 1):
        return None
    return [results[0].dim() - 3]


def _propagate_elementwise(
    tensors: list[Tensor], results: list[Tensor], label: Any, least: int
) -> list[int | None] | None:
    """Propagate through an elementwise operation with broadcasting, for dimensions up to -least."""
    from_right = {tensor.dim() - label(tensor)[1] for tensor in tensors if label(tensor)}
    if len(from_right) != 1 or (back := from_right.pop()) < least:
        return None
    if any(tensor.dim() >= back and tensor.shape[-back] != 1 for tensor in tensors if not label(tensor)):
        return None
    return [result.dim() - back if result.dim() >= back else None for result in results]


def _propagate_through_view(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Return where `dim` is in a view; it must be the outermost of the merged or split dimensions."""
    outer = math.prod(before[:dim])
    index, product = 0, 1
    while index < len(after) and (product < outer or (after[index] == 1 and before[dim] != 1)):
        product *= after[index]
        index += 1
    if product != outer or index == len(after):
        return None
    inner, new = math.prod(before[dim:]), math.prod(after[index:])
    return (
        index
        if inner == new and (after[index] % before[dim] == 0 or before[dim] % after[index] == 0)
        else None
    )

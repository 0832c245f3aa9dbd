"""Replace the attention of torch and of transformers while a block runs.

Each way to call attention becomes one value, `AttentionArguments`, of which a handler returns the result.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.torch_compat import fused_layers_disabled

ATTENTION = F.scaled_dot_product_attention
MULTI_HEAD_ATTENTION = F.multi_head_attention_forward
ATTENTION_FUNCTIONS = ((F, "scaled_dot_product_attention"), (F, "multi_head_attention_forward"))
MULTI_HEAD_PARAMETERS = inspect.signature(MULTI_HEAD_ATTENTION)


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of one call of attention.

    query, key, value: (..., heads, positions, head width).
    masks: by the name of the argument, each with a shape that expands to (..., heads, queries, keys). They
    are additive, or False where a query may not see a key.
    compute: compute(query, key, value, masks, is_causal) returns the result of the original function.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Mapping[str, Tensor]
    is_causal: bool
    compute: Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], bool], Any]
    ring_options: dict[str, Any] | None = None  # arguments of ring attention; None if it cannot compute this
    # of attention (..., heads, queries, width), for a result that was not computed by `compute`
    finish: Callable[[Tensor], Any] = lambda output: output


class AttentionHandler(Protocol):
    def attend(self, arguments: AttentionArguments, /) -> Any:
        """Return what the replaced function returns."""


@contextlib.contextmanager
def replace_attention(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` answer calls of attention in this context.

    They are calls of `F.scaled_dot_product_attention`, also by torch's own layers, and the attention of
    transformers. Fused kernels, which would bypass it, are disabled.
    """
    pending: dict[str, Tensor] = {}  # masks of torch's multi-head attention, for the attention that it calls
    with contextlib.ExitStack() as stack:
        stack.enter_context(fused_layers_disabled())
        for owner, name, replacement in (
            (F, "scaled_dot_product_attention", _replace_scaled_dot_product(handler, pending)),
            (F, "multi_head_attention_forward", _replace_multi_head(pending)),
            *_library_replacements(handler),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


@contextlib.contextmanager
def watch_attention() -> Iterator[list[None]]:
    """Yield a list that has an item for each call of attention in this context."""
    calls: list[None] = []

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return function(*args, **kwargs)

        return attention

    with contextlib.ExitStack() as stack:
        stack.enter_context(fused_layers_disabled())
        chooser = _library_chooser()
        functions = (
            ATTENTION_FUNCTIONS if chooser is None else (*ATTENTION_FUNCTIONS, (chooser, "get_interface"))
        )
        for owner, name in functions:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, watch(getattr(owner, name)))
        yield calls


def combine_masks(masks: Iterable[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return one mask with the effect of all."""
    combined = None
    for mask in masks:
        if combined is None:
            combined = mask
        elif combined.dtype == mask.dtype == torch.bool:
            combined = combined & mask
        else:
            combined = _to_additive(combined, dtype) + _to_additive(mask, dtype)
    return combined


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _replace_scaled_dot_product(handler: AttentionHandler, pending: dict[str, Tensor]) -> Callable[..., Any]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        options = {"scale": scale, "enable_gqa": enable_gqa}

        def compute(
            query: Tensor, key: Tensor, value: Tensor, masks: Mapping[str, Tensor], is_causal: bool
        ) -> Tensor:
            mask = combine_masks(masks.values(), query.dtype)
            return ATTENTION(query, key, value, mask, dropout_p, is_causal, **options)  # type: ignore[arg-type]

        masks = pending | ({"attn_mask": attn_mask} if attn_mask is not None else {})
        pending.clear()
        return handler.attend(
            AttentionArguments(
                query, key, value, masks, is_causal, compute, options if dropout_p == 0 else None
            )
        )

    return attention


def _replace_multi_head(pending: dict[str, Tensor]) -> Callable[..., Any]:
    """Return torch's multi-head attention for slices, whose shapes do not match those of its masks.

    It returns no weights.
    """

    def attention(*args: Any, **kwargs: Any) -> Any:
        bound = MULTI_HEAD_PARAMETERS.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        padding, mask, heads = (arguments[key] for key in ("key_padding_mask", "attn_mask", "num_heads"))
        arguments["need_weights"] = False
        if padding is not None or (mask is not None and not arguments["is_causal"]):
            arguments.update(key_padding_mask=None, attn_mask=None, is_causal=False)
            dtype = arguments["query"].dtype
            if padding is not None:  # (batch, keys) or (keys)
                pending["key_padding_mask"] = _invert(padding, dtype)[..., None, None, :]
            if mask is not None:  # (queries, keys) or (batch × heads, queries, keys)
                mask = _invert(mask, dtype)
                pending["attn_mask"] = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
        return MULTI_HEAD_ATTENTION(**arguments)

    return attention


def _invert(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of torch's multi-head attention, which is True where a key is hidden, as additive."""
    return _to_additive(~mask, dtype) if mask.dtype == torch.bool else mask


def _library_chooser() -> Any:
    return getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)


def _library_replacements(handler: AttentionHandler) -> Iterator[tuple[Any, str, Any]]:
    """Yield the class of transformers that chooses the attention of a model, its method and another one."""
    chooser = _library_chooser()
    if chooser is None:
        return
    choose = chooser.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = choose(self, name, default)
        return _replace_library_attention(function, name, handler) if name in ("eager", "sdpa") else function

    yield chooser, "get_interface", get_interface


def _replace_library_attention(
    function: Callable[..., Any], name: str, handler: AttentionHandler
) -> Callable[..., Any]:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
    ) -> Any:
        bias = options.get("position_bias")
        if name == "sdpa" and bias is None:
            # calls F.scaled_dot_product_attention
            return function(module, query, key, value, mask, **options)
        given = options.get("is_causal")
        is_causal = (
            name == "sdpa"
            and mask is None
            and query.size(-2) > 1
            and bool(getattr(module, "is_causal", True) if given is None else given)
        )

        def compute(
            query: Tensor, key: Tensor, value: Tensor, masks: Mapping[str, Tensor], is_causal: bool
        ) -> Any:
            given = dict(masks)
            biases = {} if bias is None else {"position_bias": given.pop("position_bias")}
            causal = {"is_causal": is_causal} if name == "sdpa" else {}
            mask = combine_masks(given.values(), query.dtype)
            with replace_attention(_Original()):
                return function(module, query, key, value, mask, **{**options, **causal, **biases})

        named = {"attention_mask": mask, "position_bias": bias}
        masks = {key: tensor for key, tensor in named.items() if tensor is not None}
        return handler.attend(
            AttentionArguments(
                query,
                key,
                value,
                masks,
                is_causal,
                compute,
                finish=lambda output: (output.transpose(1, 2).contiguous(), None),
            )
        )

    return attention


class _Original:
    """Computes attention as without a replacement."""

    def attend(self, arguments: AttentionArguments) -> Any:
        return arguments.compute(
            arguments.query, arguments.key, arguments.value, arguments.masks, arguments.is_causal
        )

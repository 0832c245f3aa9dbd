"""Attention over a sequence whose positions lie on several ranks: torch's own ring, behind scaled_dot_product_attention.

torch's `context_parallel` leads to it through DTensor and knows the kernels of CUDA only (2.13); the functions beneath it take any.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import PlanError
from paceline.plan.plan import Plan

Attention = Callable[..., Tensor]


@contextlib.contextmanager
def replace_attention(function: Attention) -> Iterator[None]:
    """For the time of this context `F.scaled_dot_product_attention` is `function`, also in torch's own layers, whose fused ways
    without gradients would pass by it."""
    kept = F.scaled_dot_product_attention
    fused = torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = function
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kept
        torch.backends.mha.set_fastpath_enabled(fused)


@lru_cache(64)
def rank_positions(length: int, rank: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """Of a sequence of `length` the positions that lie on `rank`: where they can be cut so, a piece of its head and one of its tail,
    so that causal attention costs each rank the same."""
    if length % (2 * ranks):
        return torch.arange(length, device=device).chunk(ranks)[rank]
    pieces = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


class GatherSlices(torch.autograd.Function):
    """The whole of what lies in slices along `dim`."""

    @staticmethod
    def forward(ctx: Any, here: Tensor, dim: int, length: int, mesh: DeviceMesh) -> Tensor:
        ranks, device = mesh.size(), here.device
        parts = [torch.empty_like(here, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, here.contiguous(), group=mesh.get_group())
        order = torch.cat([rank_positions(length, rank, ranks, device) for rank in range(ranks)])
        ctx.dim, ctx.ranks, ctx.mine = (
            dim,
            ranks,
            rank_positions(length, mesh.get_local_rank(), ranks, device),
        )
        return torch.cat(parts, dim).index_select(dim, order.argsort())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.index_select(ctx.dim, ctx.mine) * ctx.ranks, None, None, None


@dataclass(frozen=True)
class RingAttention:
    """Called in place of `F.scaled_dot_product_attention`, with this rank's positions of query, key and value."""

    mesh: DeviceMesh  # of the ranks that share a sequence
    plan: Plan

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """query, key, value: (..., heads, T / cp, head width)."""
        if dropout_p:
            raise PlanError(no_dropout_message(self.plan, dropout_p))
        if attn_mask is not None:
            is_causal = self._only_causal(attn_mask, query.size(-2) * self.mesh.size())
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (of.to(torch.get_autocast_dtype(kind)) for of in (query, key, value))
        if enable_gqa:
            key, value = (of.repeat_interleave(query.size(-3) // of.size(-3), -3) for of in (key, value))
        if not query.shape == key.shape == value.shape:
            shapes = ", ".join(str(tuple(of.shape)) for of in (query, key, value))
            raise PlanError(
                f"plan {self.plan}: ring attention takes query, key and value of one shape, got {shapes}; use a plan without cp"
            )
        width = query.size(-1)
        pad = -width % 8 if kind == "cuda" else 0  # what its kernels take
        parts = [F.pad(of, (0, pad)) if pad else of for of in (query, key, value)]
        parts = [of.reshape(-1, *of.shape[-3:]) if of.dim() > 2 else of[None, None] for of in parts]
        out: Tensor = _RingFunction.apply(
            self.mesh, is_causal, width**-0.5 if scale is None else scale, *parts
        )
        return out[..., :width].reshape(query.shape)

    def _only_causal(self, mask: Tensor, length: int) -> bool:
        """Whether a mask is that of causal attention, and not one that leaves all open. Raises PlanError for any other."""
        if mask.shape[-2:] == (length, length):
            seen = mask if mask.dtype == torch.bool else mask == 0
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
            causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
            if bool(seen.all()):
                return False
            if bool(((seen == causal) & (hidden == ~causal)).all()):
                return True
        raise PlanError(
            f"plan {self.plan}: attention has a mask of shape {tuple(mask.shape)} that is not the causal one, which ring attention cannot "
            "take; leave it out or say is_causal=True, or use a plan without cp"
        )


def no_dropout_message(plan: Plan, probability: float) -> str:
    return f"plan {plan}: attention has a dropout of {probability}, which ring attention has not; set it to 0, or use a plan without cp"


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, is_causal: bool, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.kernel = _KERNELS[
            "cpu" if query.device.type == "cpu" else "half" if query.dtype.itemsize == 2 else "float"
        ]
        key, value = key.contiguous(), value.contiguous()
        with _ring_options(query, is_causal):
            out, sums, *ctx.rest = ctx.kernel.forward(mesh, query, key, value, is_causal, scale)
        # As the kernels themselves lay it out: what joins the heads of a position then needs no copy, which would be kept as well.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mesh, ctx.is_causal, ctx.scale = mesh, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with _ring_options(grad, ctx.is_causal):
            grads = ctx.kernel.backward(
                ctx.mesh,
                grad.contiguous(),
                *ctx.saved_tensors,
                *ctx.rest,
                is_causal=ctx.is_causal,
                scale=ctx.scale,
            )
        return None, None, None, *grads[:3]


@contextlib.contextmanager
def _ring_options(query: Tensor, is_causal: bool) -> Iterator[None]:
    """torch's options are global, and its sums are float32 unless it is told otherwise."""
    from torch.distributed.tensor.experimental._attention import _cp_options as options

    kept = options.enable_load_balance, options.convert_to_f32
    # Without a mask the order of positions does not matter. An odd number of them here is not a head and a tail.
    options.enable_load_balance, options.convert_to_f32 = (
        is_causal and query.size(2) % 2 == 0,
        query.dtype != torch.float64,
    )
    try:
        yield
    finally:
        options.enable_load_balance, options.convert_to_f32 = kept


@dataclass(frozen=True)
class _Kernel:
    """forward(mesh, query, key, value, is_causal, scale) -> output, log of the sums, what else backward wants.
    backward(mesh, gradient, query, key, value, output, log of the sums, …, is_causal=, scale=) -> three gradients, …"""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _cpu(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Any:
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return _import_ring()._templated_ring_attention(
        mesh.get_group(), 2, op, query, key, value, is_causal=is_causal, scale=scale
    )


def _cpu_backward(mesh: DeviceMesh, grad: Tensor, *saved: Tensor, is_causal: bool, scale: float) -> Any:
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    ring = _import_ring()._templated_ring_attention_backward
    return ring(
        mesh.get_group(), 2, op, grad, "grad_out", *saved, is_causal=is_causal, dropout_p=0.0, scale=scale
    )


def _half(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Any:
    return _import_ring()._scaled_dot_product_ring_flash_attention(
        mesh, query, key, value, is_causal=is_causal, scale=scale
    )


def _half_backward(mesh: DeviceMesh, grad: Tensor, *saved: Any, is_causal: bool, scale: float) -> Any:
    first, (seed, offset) = saved[:9], saved[9:11]
    return _import_ring()._scaled_dot_product_ring_flash_attention_backward(
        mesh, grad, *first, 0.0, is_causal, seed, offset, scale=scale
    )


def _float(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Any:
    return _import_ring()._scaled_dot_product_ring_efficient_attention(
        mesh, query, key, value, is_causal=is_causal, scale=scale
    )


def _float_backward(mesh: DeviceMesh, grad: Tensor, *saved: Tensor, is_causal: bool, scale: float) -> Any:
    query, key, value, out, sums, seed, offset = saved
    wanted = (True, True, True, False)
    ring = _import_ring()._scaled_dot_product_ring_efficient_attention_backward
    return ring(
        mesh, grad, query, key, value, None, out, sums, seed, offset, 0.0, wanted, is_causal, scale=scale
    )


def _import_ring() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


_KERNELS = {
    "cpu": _Kernel(_cpu, _cpu_backward),
    "half": _Kernel(_half, _half_backward),
    "float": _Kernel(_float, _float_backward),
}

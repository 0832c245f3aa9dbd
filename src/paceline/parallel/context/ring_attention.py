"""Ring attention over a sequence that is split over ranks, called as scaled_dot_product_attention.

torch 2.13: `context_parallel` uses DTensor and supports only the kernels of CUDA; the functions below it,
which this module calls, support any kernel.
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
    """Replace `F.scaled_dot_product_attention` by `function` in this context.

    torch's own layers use it too: their fused kernels for passes without gradients, which would bypass it,
    are disabled.
    """
    previous = F.scaled_dot_product_attention
    fused = torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = function
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = previous
        torch.backends.mha.set_fastpath_enabled(fused)


@lru_cache(64)
def rank_positions(length: int, rank: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a sequence of `length` that `rank` has.

    If possible they are a chunk of its first half and the mirrored chunk of its second half, so that causal
    attention costs each rank the same.
    """
    if length % (2 * ranks):
        return torch.arange(length, device=device).chunk(ranks)[rank]
    chunks = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


class GatherSlices(torch.autograd.Function):
    """Gather slices along `dim`. The backward pass multiplies the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, length: int, mesh: DeviceMesh) -> Tensor:
        ranks, device = mesh.size(), local.device
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, local.contiguous(), group=mesh.get_group())
        order = torch.cat([rank_positions(length, rank, ranks, device) for rank in range(ranks)])
        ctx.dim, ctx.ranks = dim, ranks
        ctx.positions = rank_positions(length, mesh.get_local_rank(), ranks, device)
        return torch.cat(parts, dim).index_select(dim, order.argsort())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.index_select(ctx.dim, ctx.positions) * ctx.ranks, None, None, None


@dataclass(frozen=True)
class RingAttention:
    """A replacement of `F.scaled_dot_product_attention` for the positions of this rank."""

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
        """Return attention over the whole sequence for the positions of this rank.

        query, key, value: (..., heads, T / cp, head width).

        Raises PlanError for dropout, for a mask that is not causal, and for tensors of different shapes.
        """
        if dropout_p:
            raise PlanError(no_dropout_message(self.plan, dropout_p))
        if attn_mask is not None:
            is_causal = self._is_causal(attn_mask, query.size(-2) * self.mesh.size())
        device_type = query.device.type
        if torch.is_autocast_enabled(device_type):
            query, key, value = (
                tensor.to(torch.get_autocast_dtype(device_type)) for tensor in (query, key, value)
            )
        if enable_gqa:
            key, value = (
                tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value)
            )
        if not query.shape == key.shape == value.shape:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise PlanError(
                f"plan {self.plan}: ring attention requires query, key and value of one shape, got {shapes}; "
                "use a plan without cp"
            )
        width = query.size(-1)
        pad = -width % 8 if device_type == "cuda" else 0  # its kernels require a multiple of 8
        parts = [F.pad(tensor, (0, pad)) if pad else tensor for tensor in (query, key, value)]
        parts = [part.reshape(-1, *part.shape[-3:]) if part.dim() > 2 else part[None, None] for part in parts]
        out: Tensor = _RingFunction.apply(
            self.mesh, is_causal, width**-0.5 if scale is None else scale, *parts
        )
        return out[..., :width].reshape(query.shape)

    def _is_causal(self, mask: Tensor, length: int) -> bool:
        """Return True for a causal mask and False for a mask without masked positions.

        Raises PlanError for any other mask.
        """
        if mask.shape[-2:] == (length, length):
            visible = mask if mask.dtype == torch.bool else mask == 0
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
            causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
            if bool(visible.all()):
                return False
            if bool(((visible == causal) & (hidden == ~causal)).all()):
                return True
        raise PlanError(
            f"plan {self.plan}: ring attention requires a causal mask or none, got a mask of shape "
            f"{tuple(mask.shape)}; remove it or use is_causal=True, or use a plan without cp"
        )


def no_dropout_message(plan: Plan, probability: float) -> str:
    return (
        f"plan {plan}: ring attention does not support dropout, got a probability of {probability}; "
        "set it to 0, or use a plan without cp"
    )


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
            out, logsumexp, *ctx.rest = ctx.kernel.forward(mesh, query, key, value, is_causal, scale)
        # This is the memory layout of the kernels: joining the heads of a position then needs no copy, which
        # autograd would save too.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, logsumexp)
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
    """Set torch's global options of ring attention; its sums are float32 by default."""
    from torch.distributed.tensor.experimental._attention import _cp_options as options

    previous = options.enable_load_balance, options.convert_to_f32
    # Without a mask the order of positions does not matter. An odd number of them is one chunk, not two.
    options.enable_load_balance, options.convert_to_f32 = (
        is_causal and query.size(2) % 2 == 0,
        query.dtype != torch.float64,
    )
    try:
        yield
    finally:
        options.enable_load_balance, options.convert_to_f32 = previous


@dataclass(frozen=True)
class _Kernel:
    """A kernel of ring attention for one kind of device and dtype.

    forward(mesh, query, key, value, is_causal, scale) -> output, logsumexp, further values for backward
    backward(mesh, gradient, query, key, value, output, logsumexp, …, is_causal=, scale=) -> three gradients,
    …
    """

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
    query, key, value, out, logsumexp, seed, offset = saved
    output_mask = (True, True, True, False)
    ring = _import_ring()._scaled_dot_product_ring_efficient_attention_backward
    return ring(
        mesh,
        grad,
        query,
        key,
        value,
        None,
        out,
        logsumexp,
        seed,
        offset,
        0.0,
        output_mask,
        is_causal,
        scale=scale,
    )


def _import_ring() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


_KERNELS = {
    "cpu": _Kernel(_cpu, _cpu_backward),
    "half": _Kernel(_half, _half_backward),
    "float": _Kernel(_float, _float_backward),
}

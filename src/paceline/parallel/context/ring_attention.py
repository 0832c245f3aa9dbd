"""Ring attention over a sequence that is split evenly over ranks.

torch 2.13: `context_parallel` uses DTensor and supports only the kernels of CUDA; the functions below it,
which this module calls, support any kernel.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.parallel.context.slices import refuse_second_order


@dataclass(frozen=True)
class RingAttention:
    """`F.scaled_dot_product_attention` of sequences that are sliced evenly over the ranks of a mesh."""

    mesh: DeviceMesh

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention over the whole sequence for the positions of this rank.

        query, key, value: (..., heads, T / cp, head width).
        """
        if enable_gqa:
            key, value = (
                tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value)
            )
        width = query.size(-1)
        # its kernels require a multiple of 8
        pad = -width % 8 if query.device.type == "cuda" else 0
        parts = [F.pad(tensor, (0, pad)) if pad else tensor for tensor in (query, key, value)]
        parts = [part.reshape(-1, *part.shape[-3:]) if part.dim() > 2 else part[None, None] for part in parts]
        out: Tensor = _RingFunction.apply(
            self.mesh, is_causal, width**-0.5 if scale is None else scale, *parts
        )
        return out[..., :width].reshape(query.shape)


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
        refuse_second_order()
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

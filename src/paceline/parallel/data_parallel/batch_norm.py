"""BatchNorm over the samples of all ranks: torch's SyncBatchNorm on CUDA, and an equivalent on the CPU.

torch's SyncBatchNorm does not support the CPU. `unsync_batch_norm` returns to the samples of each rank.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sync_batch_norm(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None, equal_counts: bool = True
) -> nn.Module:
    """Return `model` with BatchNorm layers over the samples of all ranks (of one micro-batch).

    Names and parameters do not change.

    group: the ranks that have other samples for the same layers; None: all ranks.
    equal_counts: each rank has the same number of samples.
    """
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            forward = partial(_forward, group=group, equal_counts=equal_counts)
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return model


def unsync_batch_norm(model: nn.Module) -> None:
    """Undo `sync_batch_norm` on the CPU: each rank normalizes over its samples."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            forward = nn.modules.batchnorm._BatchNorm.forward
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a layer normalizes over samples, with or without running statistics."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def find_running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of BatchNorm layers by name. Buffers of other layers may mean anything."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    }


@torch.no_grad()
def average_(statistics: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Average running means and variances over the ranks of a group, in place."""
    flat = torch.cat([buffer.flatten() for buffer in statistics])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = flat.split([buffer.numel() for buffer in statistics])
    torch._foreach_copy_(
        statistics, [part.view_as(buffer) for part, buffer in zip(parts, statistics, strict=True)]
    )


def _sum_over_ranks(count: int, group: dist.ProcessGroup | None) -> int:
    whole = torch.tensor(count)
    dist.all_reduce(whole, group=group)
    return int(whole)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is all-reduced too, because the loss of each rank depends on the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        whole = value.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


def _forward(
    self: nn.modules.batchnorm._BatchNorm, x: Tensor, group: dist.ProcessGroup | None, equal_counts: bool
) -> Tensor:
    """Normalize x, (samples, channels, …), over the samples of all ranks.

    The variance is computed around the mean, in a second sum: E[x²] - E[x]² loses half of the digits.
    """
    self._check_input_dim(x)
    # Without running statistics, an evaluation uses those of its batch. Ranks may have no batch at its end.
    if not self.training:
        return type(self).forward(self, x)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.size(1)
    count = count * dist.get_world_size(group) if equal_counts else _sum_over_ranks(count, group)
    mean = _SumOverRanks.apply(x.sum(others), group) / count
    centered = x - mean.view(shape)
    variance = _SumOverRanks.apply(centered.square().sum(others), group) / count
    if self.training and self.running_mean is not None and self.running_var is not None:
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(
                (variance * (count / max(1, count - 1))).to(self.running_var.dtype), momentum
            )
    normal = centered * torch.rsqrt(variance + self.eps).view(shape)
    if not self.affine:
        return normal
    return normal * self.weight.view(shape) + self.bias.view(shape)

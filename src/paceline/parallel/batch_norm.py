"""BatchNorm over the samples of all ranks: torch's SyncBatchNorm on CUDA, and its like on the CPU, where torch's refuses to run.

Or over those of each rank, where somebody asks for it.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sync_batch_norm(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None, alike: bool = True
) -> nn.Module:
    """`model` with BatchNorm layers that see the samples of all ranks (of one micro-batch). Names and parameters stay as they are.

    group: of the ranks that have other samples for the same layers; None: all ranks. `alike`: each has as many samples."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = MethodType(partial(_forward, group=group, alike=alike), module)  # type: ignore[method-assign]
    return model


def unsync_batch_norm(model: nn.Module) -> None:
    """Take `over_all_ranks` back."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = MethodType(nn.modules.batchnorm._BatchNorm.forward, module)  # type: ignore[method-assign]


def find_running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of BatchNorm, by name. Those of other layers may mean anything."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    }


@torch.no_grad()
def average_(statistics: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Make running means and variances those of all ranks of a group, which each took from its own samples."""
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
    """Each rank's loss depends on the sums, so their gradients are summed over the ranks too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        whole = value.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.forward(ctx, grad, ctx.group), None


def _forward(
    self: nn.modules.batchnorm._BatchNorm, x: Tensor, group: dist.ProcessGroup | None, alike: bool
) -> Tensor:
    """x: (samples, channels, …). The variance is taken around the mean, in a second sum: E[x²] - E[x]² loses half of the digits."""
    self._check_input_dim(x)
    if not self.training and self.running_mean is not None:
        return type(self).forward(self, x)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.size(1)
    count = count * dist.get_world_size(group) if alike else _sum_over_ranks(count, group)
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

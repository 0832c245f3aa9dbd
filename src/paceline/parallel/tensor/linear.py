"""How a layer computes on its part of the weights: what it sums and gathers over the ranks of a tensor axis."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.distributed.dtensor import local_tensor, shard_size
from paceline.parallel.tensor.tracer import is_transposed, linear_features

TensorFunction = Callable[[Tensor], Tensor]


def _local_linear(module: Any, x: Tensor, bias: bool) -> Tensor:
    weight = local_tensor(module.weight)
    added = local_tensor(module.bias) if bias and module.bias is not None else None
    return F.linear(x, weight.t() if is_transposed(module) else weight, added)


def _column(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, add: TensorFunction
) -> TensorFunction:
    return lambda x: _local_linear(module, enter(x), bias=True)


def _gather(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, add: TensorFunction
) -> TensorFunction:
    return lambda x: _GatherOutput.apply(
        _local_linear(module, enter(x), bias=True), linear_features(module)[1], group
    )


def _row(module: Any, group: dist.ProcessGroup, enter: TensorFunction, add: TensorFunction) -> TensorFunction:
    def forward(x: Tensor) -> Tensor:
        whole = add(_local_linear(module, x, bias=False))
        return whole + module.bias if module.bias is not None else whole

    return forward


def _vocabulary(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, add: TensorFunction
) -> TensorFunction:
    def forward(ids: Tensor) -> Tensor:
        weight = local_tensor(module.weight)
        here = ids - group.rank() * shard_size(module.num_embeddings, group.size())
        elsewhere = (here < 0) | (here >= len(weight))
        rows = F.embedding(here.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return add(rows)

    return forward


def _head(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, add: TensorFunction
) -> TensorFunction:
    """What the model returns: whole, or split along its last dimension where the loss can be computed so."""

    def forward(x: Tensor) -> Tensor:
        part = _local_linear(module, enter(x), bias=True)
        if module.training and getattr(module, SPLIT_LOSS, False):
            mesh = module.weight.device_mesh
            axis = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh
            return as_split_dtensor(part, linear_features(module)[1], axis)
        return _GatherOutput.apply(part, linear_features(module)[1], group)

    return forward


def as_split_dtensor(part: Tensor, features: int, axis: Any) -> Any:
    """The tensor whose last dimension is split over the one axis of a mesh, as torch's DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:-1], features))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(), axis, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=strides
    )


SPLIT_LOSS = "_paceline_split_loss"
FORWARDS: dict[
    str, Callable[[Any, Any, TensorFunction, TensorFunction], TensorFunction]
] = {  # module, group, what enters, what is summed
    "column": _column,
    "row": _row,
    "gather": _gather,
    "head": _head,
    "vocabulary": _vocabulary,
}


class SharedEntry:
    """Where activations meet split weights, of whose gradient each rank has a part. Layers side by side share what is done there."""

    def __init__(self) -> None:
        self.layers = 0
        self.last: tuple[Tensor, Tensor] | None = (
            None  # what came, and what was made of it, until all layers have had it
        )
        self.left = 0

    def __call__(self, x: Tensor, enter: TensorFunction) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last, self.left = (x, enter(x)), self.layers
        entered = self.last[1]
        self.left -= 1
        if not self.left:
            self.last = None
        return entered


def copy_to_split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whole activations, whose gradient is summed."""
    entered: Tensor = _EnterSplitLinear.apply(x, group)
    return entered


def sum_partials(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole sum over the ranks."""
    whole: Tensor = _SumPartials.apply(summand, group)
    return whole


class _EnterSplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.contiguous()
        dist.all_reduce(whole, group=group)
        ctx.mark_dirty(whole) if whole is part else None
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherOutput(torch.autograd.Function):
    """All ranks go on alike from here, so each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
        width = shard_size(features, group.size())
        ctx.begin, ctx.features = group.rank() * width, part.shape[-1]
        padded = F.pad(part, (0, width - part.shape[-1])).contiguous()  # nothing where all are of one width
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        whole = torch.cat(parts, -1)
        return (
            whole if whole.shape[-1] == features else whole[..., :features].clone()
        )  # no view, which the model could not write to

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.begin, ctx.features), None, None

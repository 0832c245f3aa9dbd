"""Forward passes of split layers, with the collectives that they need over the ranks of a tensor axis."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.chunked_loss import VocabularyPart, chunked_cross_entropy
from paceline.distributed.dtensor import local_tensor, shard_size
from paceline.parallel.tensor.tracer import is_transposed, linear_features

TensorFunction = Callable[[Tensor], Tensor]
# (module, group, enter, reduce) -> the forward of `module`. `enter` prepares the input for split weights;
# `reduce` sums the partial outputs of the ranks.
ForwardBuilder = Callable[[Any, dist.ProcessGroup, TensorFunction, TensorFunction], Callable[..., Tensor]]

# attribute of a layer that computes its weight: the dimension of which each rank uses a part, and the group
COMPUTED_SPLIT = "_paceline_computed_split"
SPLIT_LOSS = "_paceline_split_loss"  # attribute of a head: whether its output stays split in training


def _local_linear(module: Any, x: Tensor, bias: bool) -> Tensor:
    weight = _local_weight(module)
    local_bias = local_tensor(module.bias) if bias and module.bias is not None else None
    return F.linear(x, weight.t() if is_transposed(module) else weight, local_bias)


def _local_weight(module: Any) -> Tensor:
    """Return the part of the weight of a linear layer that this rank uses."""
    split = getattr(module, COMPUTED_SPLIT, None)
    if split is None:
        return local_tensor(module.weight)
    dim, group = split
    part: Tensor = module.weight.chunk(group.size(), dim)[group.rank()]
    return part


def build_column_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> TensorFunction:
    """Return a forward whose output is split along its last dimension."""
    return lambda x: _local_linear(module, enter(x), bias=True)


def build_gather_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> TensorFunction:
    """Return a forward that gathers its split output."""
    return lambda x: _GatherOutput.apply(
        _local_linear(module, enter(x), bias=True), linear_features(module)[1], group
    )


def build_row_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> TensorFunction:
    """Return a forward that takes split features and sums the products of all ranks."""

    def forward(x: Tensor) -> Tensor:
        whole = reduce(_local_linear(module, x, bias=False))
        return whole + module.bias if module.bias is not None else whole

    return forward


def build_vocabulary_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> TensorFunction:
    """Return the forward of an embedding with split rows: each rank looks up its rows, then a sum."""

    def forward(ids: Tensor) -> Tensor:
        weight = local_tensor(module.weight)
        local_ids = ids - group.rank() * shard_size(module.num_embeddings, group.size())
        is_remote = (local_ids < 0) | (local_ids >= len(weight))
        rows = F.embedding(local_ids.masked_fill(is_remote, 0), weight).masked_fill(
            is_remote.unsqueeze(-1), 0
        )
        return reduce(rows)

    return forward


def build_head_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> TensorFunction:
    """Return the forward of a layer whose output the model returns.

    In training the output stays split along its last dimension if the loss can be computed from parts; else
    it is gathered.
    """

    def forward(x: Tensor) -> Tensor:
        part = _local_linear(module, enter(x), bias=True)
        if module.training and getattr(module, SPLIT_LOSS, False):
            mesh = module.weight.device_mesh
            axis = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh
            return as_split_dtensor(part, linear_features(module)[1], axis)
        return _GatherOutput.apply(part, linear_features(module)[1], group)

    return forward


def build_loss_forward(
    module: Any, group: dist.ProcessGroup, enter: TensorFunction, reduce: TensorFunction
) -> Callable[..., Tensor]:
    """Return the forward of a CrossEntropyHead: each rank computes logits of its classes.

    The ranks combine two numbers of each row. Without targets, the logits are gathered.
    """

    def combine(sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        largest = sums.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        both = torch.stack([(sums - largest).exp(), picked])
        dist.all_reduce(both, group=group)
        return both[0].log() + largest, both[1]

    classes = linear_features(module)[1]
    part = VocabularyPart(group.rank() * shard_size(classes, group.size()), classes, combine)

    def forward(x: Tensor, targets: Tensor | None = None) -> Tensor:
        entered = enter(x)
        if targets is None:
            return _GatherOutput.apply(_local_linear(module, entered, bias=True), classes, group)
        bias = local_tensor(module.bias) if module.bias is not None else None
        return chunked_cross_entropy(
            entered, local_tensor(module.weight), targets, bias, part=part, options=module.options
        )

    return forward


def as_split_dtensor(part: Tensor, features: int, axis: Any) -> Any:
    """Return the DTensor whose last dimension, of size `features`, is split over the 1-D mesh `axis`."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:-1], features))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(), axis, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=strides
    )


class SharedEntry:
    """The entry of activations into split layers with the same input.

    Each rank has a part of the gradient of the input. Layers with the same input enter it once, so that their
    gradients are summed by one collective.
    """

    def __init__(self) -> None:
        self.num_layers = 0
        # the input and its entered form, until all layers have taken it
        self.current: tuple[Tensor, Tensor] | None = None
        self.num_remaining = 0

    def __call__(self, x: Tensor, enter: TensorFunction) -> Tensor:
        if self.current is None or self.current[0] is not x:
            self.current, self.num_remaining = (x, enter(x)), self.num_layers
        entered = self.current[1]
        self.num_remaining -= 1
        if not self.num_remaining:
            self.current = None
        return entered


def copy_to_split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`, and all-reduce its gradient over the ranks."""
    entered: Tensor = _EnterSplitLinear.apply(x, group)
    return entered


def sum_partials(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce the summands of the ranks. Each rank has the whole gradient already."""
    whole: Tensor = _SumPartials.apply(summand, group)
    return whole


# The backward of each function below is the forward of its counterpart, so that a task may differentiate
# gradients (torch.autograd.grad with create_graph=True).


class _EnterSplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumPartials.apply(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.contiguous()
        dist.all_reduce(whole, group=group)
        ctx.mark_dirty(whole) if whole is part else None
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _EnterSplitLinear.apply(grad, ctx.group), None


class _GatherOutput(torch.autograd.Function):
    """An all-gather without communication in the backward pass.

    All ranks compute the same from the gathered output on, so each has the whole gradient already.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
        width = shard_size(features, group.size())
        ctx.begin, ctx.features, ctx.group = group.rank() * width, part.shape[-1], group
        padded = F.pad(part, (0, width - part.shape[-1])).contiguous()  # no padding if all widths are equal
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        whole = torch.cat(parts, -1)
        # A clone and not a view, because the model may write to it in place.
        return whole if whole.shape[-1] == features else whole[..., :features].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _TakeFeatures.apply(grad, ctx.begin, ctx.features, ctx.group), None, None


class _TakeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, begin: int, features: int, group: dist.ProcessGroup) -> Tensor:
        ctx.features, ctx.group = whole.shape[-1], group
        return whole.narrow(-1, begin, features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherOutput.apply(grad, ctx.features, ctx.group), None, None, None

"""A loss of an output that is split over its vocabulary: whether the task's can be computed so, and how."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.fake import is_imagined
from paceline.data.loader import Batch
from paceline.parallel.tensor.apply import Splits
from paceline.parallel.tensor.linear import SPLIT_LOSS, as_split_dtensor
from paceline.task import Task


@contextlib.contextmanager
def split_loss() -> Iterator[None]:
    """For the loss of a split output and its backward pass: cross entropy over a vocabulary that is split (torch's loss_parallel)."""
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel(), implicit_replication():
        yield


def try_split_loss(model: nn.Module, splits: Splits, task: Task, batch: Batch, mesh: DeviceMesh) -> bool:
    """Whether the task's loss is the same for an output that is split, tried on random numbers. A collective."""
    from torch.distributed.tensor import DTensor

    heads = [name for name, style in splits.styles.items() if style == "head"]
    if len(heads) != 1 or splits.output is None:
        return False
    head: Any = model.get_submodule(heads[0])
    drawn = torch.randn(
        splits.output, generator=torch.Generator().manual_seed(0), dtype=head.weight.dtype
    ).to(head.weight.device)
    part = (
        drawn.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        .clone(memory_format=torch.contiguous_format)
        .requires_grad_()
    )
    whole = drawn.requires_grad_()
    same = True
    try:
        expected = task.loss(whole, batch)
        expected.sum().backward()
        with split_loss():
            found: Any = task.loss(as_split_dtensor(part, drawn.shape[-1], mesh), batch)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            found.sum().backward()
        assert whole.grad is not None
        own = whole.grad.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        close = is_imagined(found) or torch.allclose(found, expected, rtol=1e-4)
        same = (
            close
            and part.grad is not None
            and (is_imagined(own) or torch.allclose(part.grad, own, rtol=1e-3, atol=1e-5))
        )
    except (
        Exception
    ):  # whatever the user's loss does with a split output that torch cannot: then it is given the whole
        same = False
    if not is_imagined(drawn):
        agreed = torch.tensor(int(same), device=drawn.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        same = bool(agreed)
    setattr(head, SPLIT_LOSS, same)
    return same

"""The loss of an output that is split over its vocabulary."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.fake import is_fake
from paceline.data.samples import Batch
from paceline.parallel.loss.forward import call_loss
from paceline.parallel.tensor.apply import Splits
from paceline.parallel.tensor.linear import SPLIT_LOSS, as_split_dtensor
from paceline.task import Task


@contextlib.contextmanager
def split_loss() -> Iterator[None]:
    """Compute cross entropy over a split vocabulary, also in the backward pass (torch's loss_parallel)."""
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel(), implicit_replication():
        yield


def try_split_loss(
    model: nn.Module, splits: Splits, task: Task, batch: Batch, mesh: DeviceMesh
) -> tuple[bool, str | None]:
    """Return whether the task's loss of a split output equals that of the whole, for random outputs.

    A collective. Sets the attribute SPLIT_LOSS of the head. The second value is a note if the head is split
    and the loss needs its whole output.
    """
    from torch.distributed.tensor import DTensor

    heads = [name for name, style in splits.styles.items() if style == "head"]
    if len(heads) != 1 or splits.output_shape is None:
        return False, None
    head: Any = model.get_submodule(heads[0])
    output = torch.randn(
        splits.output_shape, generator=torch.Generator().manual_seed(0), dtype=head.weight.dtype
    ).to(head.weight.device)
    part = (
        output.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        .clone(memory_format=torch.contiguous_format)
        .requires_grad_()
    )
    whole = output.requires_grad_()
    is_same, reason = True, "its loss or gradient differs on split logits"
    try:
        expected = call_loss(task, whole, batch)
        expected.sum().backward()
        with split_loss():
            loss: Any = call_loss(task, as_split_dtensor(part, output.shape[-1], mesh), batch)
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            loss.sum().backward()
        assert whole.grad is not None
        expected_grad = whole.grad.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        is_close = is_fake(loss) or torch.allclose(loss, expected, rtol=1e-4)
        is_same = (
            is_close
            and part.grad is not None
            and (is_fake(expected_grad) or torch.allclose(part.grad, expected_grad, rtol=1e-3, atol=1e-5))
        )
    # The user's loss may use what torch does not support for a split output; it then gets the whole output.
    except Exception as error:
        is_same, reason = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
    if not is_fake(output):
        same_on_all = torch.tensor(int(is_same), device=output.device)
        dist.all_reduce(same_on_all, dist.ReduceOp.MIN)
        is_same = bool(same_on_all)
    setattr(head, SPLIT_LOSS, is_same)
    note = f"tp: loss() gets the whole output of {heads[0]}, gathered on each rank ({reason})"
    return is_same, None if is_same else note

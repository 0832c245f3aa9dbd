"""Replicated data parallelism: torch's DistributedDataParallel."""

from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.data_parallel.shared_gradients import share_gradients


def replicate(model: nn.Module, find_unused: bool = False) -> DistributedDataParallel:
    """Return `model` wrapped in DDP: gradients are averaged; weights are equal already and not broadcast."""
    replicated = DistributedDataParallel(
        model,
        init_sync=False,
        **NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )
    share_gradients(replicated)
    return replicated


def release(model: nn.Module) -> None:
    """Delete DDP's references to the process group.

    torch 2.13, gloo: DDP's reducer would otherwise destroy the group last, while it holds Python's GIL, for
    which one of the group's threads may wait. That deadlocks occasionally at the end of a training.
    """
    if isinstance(model, DistributedDataParallel):
        del model.logger, model.reducer


# torch 2.13 renamed this option; 2.11 has only the old name.
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}

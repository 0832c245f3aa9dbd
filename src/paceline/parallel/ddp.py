"""Replicated data parallelism: torch's DistributedDataParallel."""

from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, find_unused: bool = False) -> DistributedDataParallel:
    """`model` on every data rank, with averaged gradients. The weights are equal already, so nothing is broadcast."""
    return DistributedDataParallel(
        model,
        init_sync=False,
        **NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )


def release(model: nn.Module) -> None:
    """Let go of the process group. DDP's reducer would else destroy it last, while it holds Python's lock that one of the
    group's threads may wait for: a deadlock at the end of a training, now and then (torch 2.13, gloo)."""
    if isinstance(model, DistributedDataParallel):
        del model.logger, model.reducer


# torch 2.13 has another name for it, and 2.11 only the old one.
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}

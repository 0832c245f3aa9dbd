"""Replicated data parallelism: torch's DistributedDataParallel."""

from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.data_parallel.shared_gradients import measure_exchange_s, share_gradients

# torch 2.13 renamed this option; 2.11 has only the old name.
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


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


def exposed_communication(model: nn.Module | None, ranks: int) -> float | None:
    """Return the share of a step in which backward only waits for other ranks; None if it is not measured."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0 if ranks == 1 else None
    measured = model._get_ddp_logging_data()
    names = (
        "avg_forward_compute_time",
        "avg_backward_compute_time",
        "avg_backward_comm_time",
        "avg_backward_compute_comm_overlap_time",
    )
    forward, backward, comm, hidden = (measured.get(name, 0) for name in names)
    exposed = max(0, comm - hidden)
    whole = forward + backward + exposed
    exchange_s = measure_exchange_s(model)
    if exchange_s is not None:  # within the times of backward
        return min(1.0, 1e9 * exchange_s / whole) if whole else None
    return exposed / whole if whole else None


def release(model: nn.Module) -> None:
    """Delete DDP's references to the process group.

    torch 2.13, gloo: DDP's reducer would otherwise destroy the group last, while it holds Python's GIL, for
    which one of the group's threads may wait. That deadlocks occasionally at the end of a training.
    """
    if isinstance(model, DistributedDataParallel):
        del model.logger, model.reducer

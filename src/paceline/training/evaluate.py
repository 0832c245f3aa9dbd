"""Metrics over a split, each of its samples counted once, whatever the number of ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.task import Task
from paceline.training.data import Samples, batches, validation_parts
from paceline.training.step import autocast, call, weighed


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    samples: Samples,
    batch: int,
    precision: str,
    device: torch.device,
    workers: int,
    prefetch: int,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Means over the split of the loss and of what `task.metrics` returns. A collective: all ranks of `group` must call it; None: all."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = list(validation_parts(len(samples.dataset), batch, rank, ranks))
    # Under a sharded plan the forward pass is a collective: a rank without samples takes part with one that is not counted.
    parts = [(numbers or [0], numbers or [0]) for numbers in mine]
    sums: dict[str, Tensor] = {}
    model.eval()
    try:
        for numbers, data in zip(mine, batches(samples, parts, device, workers, prefetch), strict=True):
            with autocast(precision, device):
                output = call(task, model, data)
                values = {"loss": task.loss(output, data), **task.metrics(output, data)}
            weights = task.weights(data)
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    raise TaskError(f"metrics() must return tensors, got {type(value).__name__} for {name!r}")
                fitting = weights if weights is not None and (not value.dim() or value.shape == weights.shape) else None
                total, count = weighed(task, value.double(), fitting, data, name)
                here = torch.stack([total, torch.as_tensor(count, dtype=total.dtype, device=total.device)])
                sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64, device=device)) + here * bool(numbers)
    finally:
        model.train()
    table = torch.stack(list(sums.values()))
    if ranks > 1:
        dist.all_reduce(table, group=group)
    return {name: total / count for name, (total, count) in zip(sums, table.tolist(), strict=True)}

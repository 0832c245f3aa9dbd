"""Metrics over a split, each of its samples counted once, whatever the number of ranks."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.loader import Samples, batches, validation_parts
from paceline.doctor.heartbeat import EVALUATE
from paceline.errors import TaskError
from paceline.parallel.forward import ELSEWHERE, autocast, read_weights, weighted_sum
from paceline.training.first_loss import check_items
from paceline.training.step import TrainingStep
from paceline.user_code import UserCode

ASK_S = 1.0  # between two questions whether to stop


@torch.no_grad()
def evaluate(
    update: TrainingStep,
    samples: Samples,
    batch: int,
    workers: int,
    prefetch: int,
    group: dist.ProcessGroup | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Means over the split of the loss and of what `task.metrics` returns. A collective: all ranks of `group` must call it; None: all.

    `stop`: asked about once a second; None where any rank answered yes, and the evaluation was given up on all of them."""
    task, device = update.task, update.device
    mine = list(validation_parts(samples.count, batch, update.place.dp, update.data_ranks))
    # Under a sharded plan the forward pass is a collective: a rank without samples takes part with one that is not counted.
    parts = [(numbers or [0], numbers or [0]) for numbers in mine]
    sums: dict[str, Tensor] = {}
    update.model.eval()
    update.enter(EVALUATE)
    stopping = _Stopping(stop, device, group)
    source = batches(samples, parts, device, workers, prefetch)
    try:
        for numbers, data in zip(mine, source, strict=True):
            update.enter(EVALUATE)
            if stopping.asked():
                break
            output = update.output(data)
            if output is ELSEWHERE:
                continue
            with autocast(update.precision, device):
                with UserCode("loss()", task.loss):
                    values = {"loss": task.loss(output, data)}
                with UserCode("metrics()", task.metrics):
                    metrics = task.metrics(output, data)
                if not isinstance(metrics, Mapping):
                    raise TaskError(f"metrics() must return a dict of tensors, got {type(metrics).__name__}")
                values |= metrics
            weights = read_weights(task, data)
            counted = bool(numbers) and update.counts
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    raise TaskError(f"metrics() must return tensors, got {type(value).__name__} for {name!r}")
                if value.is_complex():
                    raise TaskError(
                        f"metrics() must return real tensors, got {str(value.dtype).removeprefix('torch.')} for {name!r}"
                    )
                if not value.dim() and name in metrics:
                    raise TaskError(
                        f"metrics() returned one number for {name!r}, and a batch of each rank would have its own; return a value for each "
                        "sample, such as output.argmax(-1) == batch[1], of which the mean over the split is taken"
                    )
                fitting = (
                    weights
                    if weights is not None and (not value.dim() or value.shape == weights.shape)
                    else None
                )
                if fitting is None:
                    check_items(
                        value, len(numbers) or 1, "metrics()" if name in metrics else "loss()", repr(name)
                    )
                total, count = weighted_sum(value.double(), fitting, data, name)
                here = torch.stack([total, torch.as_tensor(count, dtype=total.dtype, device=total.device)])
                sums[name] = (
                    sums.get(name, torch.zeros(2, dtype=torch.float64, device=device)) + here * counted
                )
    finally:
        source.close()
        update.model.train()
    if update.pipeline is not None:
        update.pipeline.reshard()
    if stopping.is_asked:
        return None
    if update.pipeline is not None:
        sums = _with_names_of_all(sums, device)
    table = torch.stack(list(sums.values()))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(table, group=group)
    return {name: total / count for name, (total, count) in zip(sums, table.tolist(), strict=True)}


class _Stopping:
    """Whether any rank was asked to stop: the ranks agree on that about once a second, and on when they do."""

    def __init__(self, stop: Callable[[], bool], device: torch.device, group: dist.ProcessGroup | None):
        self.stop, self.device, self.group = stop, device, group
        self.is_asked = False
        self._every = self._left = 1  # batches until the next question
        self._since = time.perf_counter()

    def asked(self) -> bool:
        """Call before each batch, on all ranks."""
        if self._left:
            self._left -= 1
            return False
        seconds = time.perf_counter() - self._since
        found = torch.tensor([float(self.stop()), seconds / self._every], dtype=torch.float64)
        if dist.get_world_size(self.group) > 1:
            here = found.to(self.device)
            dist.all_reduce(here, dist.ReduceOp.MAX, group=self.group)
            found = here.cpu()
        self.is_asked = bool(found[0])
        self._every = max(1, int(ASK_S / max(found[1].item(), 1e-6)))
        self._left, self._since = self._every - 1, time.perf_counter()
        return self.is_asked


def _with_names_of_all(sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The ranks without the last stage of a pipeline have not seen any value."""
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(sums))
    return {
        name: sums.get(name, torch.zeros(2, dtype=torch.float64, device=device))
        for name in max(everywhere, key=len)
    }

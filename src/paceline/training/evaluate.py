"""Evaluation: metrics over the validation split. Each sample counts once for any number of ranks."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.loader import Batch, Samples, batches, validation_parts
from paceline.doctor.heartbeat import EVALUATE
from paceline.errors import TaskError
from paceline.events import Evaluated
from paceline.parallel.forward import ELSEWHERE, autocast, read_weights, weighted_sum
from paceline.spec import Spec
from paceline.training.first_loss import check_items
from paceline.training.setup import PreparedTraining, TrainingData
from paceline.training.step import TrainingStep
from paceline.user_code import UserCode

ASK_S = 1.0  # between two checks whether to stop


class Evaluator:
    """Decides when a training evaluates, evaluates it, and keeps the last metrics."""

    def __init__(self, spec: Spec, data: TrainingData, prepared: PreparedTraining, workers: int):
        self.spec, self.data, self.prepared, self.workers = spec, data, prepared, workers
        self.total = spec.total_steps(data.samples)
        self.metrics: dict[str, float] = {}
        self.last_step: int | None = None  # step of the last evaluation that was completed

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps."""
        if self.data.validation is None:
            return False
        if step == self.total:
            return True
        if self.spec.evaluate_every is not None:
            return step % self.spec.evaluate_every == 0
        epochs, epochs_before = (count * self.spec.batch // self.data.samples for count in (step, step - 1))
        return epochs > epochs_before

    def run(self, step: int, stop: Callable[[], bool]) -> Evaluated | None:
        """Evaluate the model as it is after `step` steps.

        A collective. None if any rank was asked to stop.
        """
        assert self.data.validation is not None
        began = time.perf_counter()
        with self.prepared.whole_model():
            metrics = evaluate(
                self.prepared.step,
                self.data.validation,
                self.spec.batch,
                self.workers,
                self.spec.data.prefetch,
                self.prepared.group,
                stop,
            )
        if metrics is None:
            return None
        self.metrics, self.last_step = metrics, step
        return Evaluated(step=step, metrics=metrics, seconds=time.perf_counter() - began)

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the metrics after `step` steps; empty if there was no evaluation then."""
        return self.metrics if self.last_step == step else {}


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
    """Return the means over the split of the loss and of what `task.metrics` returns. A collective.

    group: the ranks that call it; None: all. `stop`: called about once a second. If it returns True on
    any rank, all ranks abandon the evaluation and return None. Raises TaskError for unsuitable metrics.
    """
    device = update.device
    mine = list(validation_parts(samples.count, batch, update.place.dp, update.data_ranks))
    # Under a sharded plan the forward pass is a collective: a rank without samples takes part with sample 0,
    # which is not counted.
    parts = [(numbers or [0], numbers or [0]) for numbers in mine]
    sums: dict[str, Tensor] = {}
    update.model.eval()
    update.on_phase(EVALUATE)
    agreement = _StopAgreement(stop, device, group)
    source = batches(samples, parts, device, workers, prefetch)
    try:
        for numbers, data in zip(mine, source, strict=True):
            update.on_phase(EVALUATE)
            if agreement.check():
                break
            output = update.output(data)
            if output is ELSEWHERE:
                continue
            counted = bool(numbers) and update.counts
            for name, pair in _weighted_sums(update, output, data, len(numbers) or 1).items():
                sums[name] = (
                    sums.get(name, torch.zeros(2, dtype=torch.float64, device=device)) + pair * counted
                )
    finally:
        source.close()
        update.model.train()
    if update.pipeline is not None:
        update.pipeline.reshard()
    if agreement.is_stopping:
        return None
    if update.pipeline is not None:
        sums = _with_names_of_all_ranks(sums, device)
    table = torch.stack(list(sums.values()))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(table, group=group)
    return {name: total / count for name, (total, count) in zip(sums, table.tolist(), strict=True)}


def _weighted_sums(update: TrainingStep, output: object, data: Batch, samples: int) -> dict[str, Tensor]:
    """Return for the loss and each metric of a batch a tensor (sum, number of items), in float64.

    samples: of the batch. Raises TaskError for values that have no mean over the split.
    """
    task = update.task
    with autocast(update.precision, update.device):
        with UserCode("loss()", task.loss):
            values = {"loss": task.loss(output, data)}
        with UserCode("metrics()", task.metrics):
            metrics = task.metrics(output, data)
        if not isinstance(metrics, Mapping):
            raise TaskError(f"metrics() must return a dict of tensors, got {type(metrics).__name__}")
        values |= metrics
    weights = read_weights(task, data)
    sums = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TaskError(f"metrics() must return tensors, got {type(value).__name__} for {name!r}")
        if value.is_complex():
            dtype = str(value.dtype).removeprefix("torch.")
            raise TaskError(f"metrics() must return real tensors, got {dtype} for {name!r}")
        if not value.dim() and name in metrics:
            raise TaskError(
                f"metrics() returned one number for {name!r}, which would differ between the batches of "
                "ranks; return a value for each sample, such as output.argmax(-1) == batch[1], so that "
                "Paceline takes the mean over the split"
            )
        has_weights = weights is not None and (not value.dim() or value.shape == weights.shape)
        if not has_weights:
            check_items(value, samples, "metrics()" if name in metrics else "loss()", repr(name))
        total, count = weighted_sum(value.double(), weights if has_weights else None, data, name)
        sums[name] = torch.stack([total, torch.as_tensor(count, dtype=total.dtype, device=total.device)])
    return sums


class _StopAgreement:
    """Whether any rank was asked to stop.

    About once a second the ranks agree on it, and on when to ask next.
    """

    def __init__(self, stop: Callable[[], bool], device: torch.device, group: dist.ProcessGroup | None):
        self.stop, self.device, self.group = stop, device, group
        self.is_stopping = False
        self._interval = self._left = 1  # batches between two checks, and until the next one
        self._since = time.perf_counter()

    def check(self) -> bool:
        """Return whether to stop. Call before each batch, on all ranks."""
        if self._left:
            self._left -= 1
            return False
        seconds = time.perf_counter() - self._since
        answer = torch.tensor([float(self.stop()), seconds / self._interval], dtype=torch.float64)
        if dist.get_world_size(self.group) > 1:
            on_device = answer.to(self.device)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group=self.group)
            answer = on_device.cpu()
        self.is_stopping = bool(answer[0])
        self._interval = max(1, int(ASK_S / max(answer[1].item(), 1e-6)))
        self._left, self._since = self._interval - 1, time.perf_counter()
        return self.is_stopping


def _with_names_of_all_ranks(sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Add zeros for values that this rank has not seen.

    (Only ranks with the last stage of a pipeline see any.)
    """
    names_by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, list(sums))
    return {
        name: sums.get(name, torch.zeros(2, dtype=torch.float64, device=device))
        for name in max(names_by_rank, key=len)
    }

"""Evaluation: metrics over a split. Each sample counts once for any number of ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.batch_slices import validation_parts
from paceline.data.loader import batches
from paceline.data.ragged import agree_on_longest
from paceline.data.samples import Batch, Samples, number_batch
from paceline.distributed.rng import derive_seed
from paceline.doctor.heartbeat import EVALUATE
from paceline.errors import TaskError
from paceline.evaluation_mode import evaluation_mode
from paceline.events import Evaluated
from paceline.metrics import Accumulator
from paceline.parallel.loss.auxiliary_loss import compute_auxiliary_loss, has_auxiliary_loss
from paceline.parallel.loss.batch_sums import SumsOfParts, read_sums
from paceline.parallel.loss.forward import ELSEWHERE, autocast, forward, read_weights, weighted_sum
from paceline.parallel.loss.global_loss import gather_splits
from paceline.parallel.loss.named_losses import NamedLosses, combine_losses, name_losses
from paceline.sample_rng import number_samples
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checks.first_loss import check_items
from paceline.training.evaluation.figures import FigureWriter
from paceline.training.evaluation.metric_totals import AccumulatedMetrics
from paceline.training.evaluation.torchmetrics_adapter import as_accumulator
from paceline.training.prepared import PreparedTraining
from paceline.training.step.step import TrainingStep
from paceline.training.training_data import TrainingData
from paceline.user_code import UserCode

Draw = Callable[[TrainingStep, Any, Batch, int, dist.ProcessGroup | None], None]
ASK_S = 1.0  # between two checks whether to stop


class Evaluator:
    """Decides when a training evaluates, evaluates it, and keeps the last metrics."""

    def __init__(
        self,
        spec: Spec,
        data: TrainingData,
        prepared: PreparedTraining,
        workers: int,
        figures: FigureWriter,
    ):
        self.spec, self.data, self.prepared, self.workers = spec, data, prepared, workers
        self.figures = figures
        self.total = spec.total_steps(data.samples)
        self.metrics: dict[str, float] = {}
        self.last_step: int | None = None  # step of the last evaluation that was completed

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps."""
        if not self.data.evaluated:
            return False
        if step == self.total:
            return True
        if self.spec.evaluate_every is not None:
            return step % self.spec.evaluate_every == 0
        epochs, epochs_before = (
            self.spec.batches.samples_before(count) // self.data.samples for count in (step, step - 1)
        )
        return epochs > epochs_before

    def run(self, step: int, stop: Callable[[], bool]) -> Evaluated | None:
        """Evaluate the model as it is after `step` steps.

        A collective. None if any rank was asked to stop.
        """
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        with self.prepared.whole_model():
            for prefix, samples in self.data.evaluated.items():
                of_split = evaluate(
                    self.prepared.step,
                    samples,
                    self.spec.batch,
                    self.workers,
                    self.spec.data.prefetch,
                    self.prepared.group,
                    stop,
                    partial(self.figures.draw, step) if not prefix else None,
                )
                if of_split is None:
                    return None
                named = {f"{prefix}{name}": value for name, value in of_split.items()}
                if clashing := metrics.keys() & named.keys():
                    raise TaskError(
                        f"metrics() returned {min(clashing)!r}, which is also a metric of the split "
                        f"{samples.split!r} of evaluate_splits; rename it"
                    )
                metrics |= named
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
    draw: Draw | None = None,
) -> dict[str, float] | None:
    """Return the loss and the metrics of the split. A collective.

    Tensors that `task.metrics` returns are averaged; accumulators are merged and finished. An auxiliary loss
    is that of the sums over the whole split.

    group: the ranks that call it; None: all. `stop`: called about once a second. If it returns True on
    any rank, all ranks abandon the evaluation and return None. draw: called with the first batch.
    Raises TaskError for unsuitable metrics.
    """
    device = update.device
    parts_by_rank = [
        list(validation_parts(samples.count, batch, rank, update.data_ranks))
        for rank in range(update.data_ranks)
    ]
    mine = parts_by_rank[update.place.dp]
    # Under a sharded plan the forward pass is a collective: a rank without samples takes part with the first
    # sample of the batch, which is not counted.
    begins = range(0, samples.count, batch)
    parts = [(numbers or [begin], numbers or [begin]) for begin, numbers in zip(begins, mine, strict=True)]
    sums: dict[str, Tensor] = {}
    accumulated = AccumulatedMetrics()
    sample_sums = SumsOfParts()
    names: dict[str, bool] = {}  # of all values in their order, and whether they are accumulators
    update.on_phase(EVALUATE)
    agreement = _StopAgreement(stop, device, group)
    source = batches(samples, parts, device, workers, prefetch, agree=agree_on_longest(group, device))
    with evaluation_mode(update.model), closing(source):
        for at, (numbers, data) in enumerate(zip(mine, source, strict=True)):
            update.on_phase(EVALUATE)
            if agreement.check():
                break
            of_batch = number_batch(samples.seed, samples.split, numbers or [0], samples.floats)
            with number_samples([data], [of_batch]):
                output = update.output(data)
                if output is ELSEWHERE:
                    continue
                if draw is not None and at == 0:
                    draw(update, output, data, len(numbers), group)
                values = _compute_values(update, output, data, [len(part[at]) for part in parts_by_rank])
                pairs = _weighted_sums(update, values, data, len(numbers) or 1)
                is_counted = bool(numbers) and update.counts
                if has_auxiliary_loss(update.task):
                    with autocast(update.precision, update.device):
                        sample_sums.add(read_sums(update.task, output, data), is_counted)
            for name, value in values.items():
                is_accumulator = isinstance(value, Accumulator)
                if names.setdefault(name, is_accumulator) is not is_accumulator:
                    raise TaskError(f"metrics() returned an accumulator for {name!r} only in some batches")
                if isinstance(value, Accumulator):
                    accumulated.add(name, value, is_counted)
            for name, pair in pairs.items():
                sums[name] = (
                    sums.get(name, torch.zeros(2, dtype=torch.float64, device=device)) + pair * is_counted
                )
    if update.pipeline is not None:
        update.pipeline.reshard()
    if update.inner is not None:
        update.inner.end()
    if agreement.is_stopping:
        return None
    if update.pipeline is not None:
        names = _names_of_all_ranks(names)
    zeros = torch.zeros(2, dtype=torch.float64, device=device)
    means = [name for name, is_accumulator in names.items() if not is_accumulator]
    table = torch.stack([sums.get(name, zeros) for name in means])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(table, group=group)
    metrics = {name: total / count for name, (total, count) in zip(means, table.tolist(), strict=True)}
    if has_auxiliary_loss(update.task):
        metrics = _add_auxiliary_loss(update, metrics, sample_sums, group)
    if update.name:  # the task has no loss but those of its updates
        metrics = {"loss": sum(metrics[name] for name in (update.name, *update.other_updates))} | metrics
    if len(means) == len(names):
        return metrics
    finished = accumulated.finish(update.plan, dist.get_rank(group), group)
    if clashing := metrics.keys() & finished.keys():
        raise TaskError(f"metrics() returned two metrics named {min(clashing)!r}; rename one of them")
    return metrics | finished


def _compute_values(
    update: TrainingStep, output: object, data: Batch, counts: Sequence[int]
) -> dict[str, Tensor | Accumulator]:
    """Return the loss and the metrics of a batch by name. Raises TaskError.

    counts: its samples by data rank.
    """
    task = update.task
    with autocast(update.precision, update.device):
        if update.global_loss is not None:
            seed = derive_seed(update.seed, "global loss", "evaluation")
            loss = update.global_loss.evaluate(gather_splits(output), data, counts, seed)
            # Each sample has the loss of its batch.
            values: dict[str, Tensor | Accumulator] = {"loss": loss.expand(counts[update.place.dp] or 1)}
        else:
            values = _compute_losses(task, update.name, output, data)
        for name, other in update.other_updates.items():
            losses = _compute_losses(other, name, forward(other, update.model, data), data)
            if clashing := values.keys() & losses.keys():
                raise TaskError(f"two losses are named {min(clashing)!r}; rename one of them")
            values |= losses
        with UserCode("metrics()", task.metrics):
            metrics = task.metrics(output, data)
        if not isinstance(metrics, Mapping):
            raise TaskError(f"metrics() must return a dict of tensors, got {type(metrics).__name__}")
    for name, value in metrics.items():
        if name in values and name != "loss":
            what = "the losses of updates()" if update.name or update.other_updates else "loss()"
            raise TaskError(f"{what} and metrics() both return {name!r}; rename one of them")
        values[name] = as_accumulator(name, value)
        _check_metric(name, values[name])
    return values


def _add_auxiliary_loss(
    update: TrainingStep, metrics: dict[str, float], sums: SumsOfParts, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the metrics with the auxiliary losses of the split, also in the loss. A collective.

    sums: over the samples of this rank; none without the last stage of a pipeline. Raises TaskError.
    """
    if dist.get_world_size(group) > 1:
        whole = sums.reduce_unlike(update.device, group)
    else:
        whole = sums.whole()
    if not whole:  # the model lacks its auxiliary outputs in evaluations
        return metrics
    with autocast(update.precision, update.device):
        loss, named = compute_auxiliary_loss(update.task, whole)
    if clashing := metrics.keys() & named.keys():
        raise TaskError(
            f"auxiliary_loss() returned {min(clashing)!r}, and so did loss() or metrics(); rename one of them"
        )
    named_values = {name: value.item() for name, value in named.items()}
    return metrics | {"loss": metrics["loss"] + loss.item()} | named_values


def _compute_losses(task: Task, update: str, output: object, data: Batch) -> dict[str, Tensor | Accumulator]:
    """Return the loss of a task by name, with the losses that it has by name. Raises TaskError.

    update: whose loss the task has, which is reported under its name; "": the loss is `loss`.
    """
    with UserCode("loss()", task.loss):
        whole: Any = task.loss(output, data)
    named: NamedLosses = {}
    if isinstance(whole, Mapping):
        whole, named = combine_losses(task, whole, data, read_weights(task, data))
    if not isinstance(whole, Tensor):
        raise TaskError(f"loss() must return a tensor, got {type(whole).__name__}")
    return {**({} if update else {"loss": whole}), **name_losses(update, whole, named)}


def _check_metric(name: str, value: object) -> None:
    """Raise TaskError for a metric that cannot be combined over batches."""
    if isinstance(value, Accumulator):
        if name == "loss":
            raise TaskError("metrics() returned an accumulator named 'loss', which is the loss; rename it")
        return
    if not isinstance(value, Tensor):
        hint = "; update() of an accumulator must return self" * (value is None)
        raise TaskError(
            f"metrics() must return tensors or accumulators, got {type(value).__name__} for {name!r}{hint}"
        )
    if value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        raise TaskError(f"metrics() must return real tensors, got {dtype} for {name!r}")
    if not value.dim():
        raise TaskError(
            f"metrics() returned one number for {name!r}, which would differ between the batches of "
            "ranks; return a value for each sample, such as output.argmax(-1) == batch[1], so that "
            "Paceline takes the mean over the split, or an accumulator (paceline.metrics, torchmetrics) if "
            "the metric is not a mean"
        )


def _weighted_sums(
    update: TrainingStep, values: Mapping[str, Tensor | Accumulator], data: Batch, samples: int
) -> dict[str, Tensor]:
    """Return for each tensor of the values of a batch a tensor (sum, number of items), in float64.

    samples: of the batch. Raises TaskError for a number of items that does not match the samples.
    """
    weights = read_weights(update.task, data)
    losses = {"loss", update.name, *update.other_updates}
    sums = {}
    for name, value in values.items():
        if isinstance(value, Accumulator):
            continue
        has_weights = weights is not None and (not value.dim() or value.shape == weights.shape)
        if not has_weights:
            check_items(
                value, samples, "loss()" if name.partition(".")[0] in losses else "metrics()", repr(name)
            )
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
        self._interval = self._left = 1  # batches between two checks, and until the next check
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


def _names_of_all_ranks(names: dict[str, bool]) -> dict[str, bool]:
    """Return the names on the ranks that have them: those with the last stage of a pipeline."""
    names_by_rank: list[dict[str, bool]] = [{}] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, names)
    return max(names_by_rank, key=len)

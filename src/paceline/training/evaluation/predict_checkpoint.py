"""Write what the model of a checkpoint predicts for each sample, as one rank under any plan."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batch import find_tensors
from paceline.data.batch_slices import validation_parts
from paceline.data.loader import batches
from paceline.data.open_samples import open_file_samples, open_samples, open_training_samples
from paceline.data.ragged import agree_on_longest
from paceline.data.samples import Samples, number_batch
from paceline.distributed.process_group import workers_per_rank
from paceline.distributed.world import World
from paceline.errors import DataError, RunError, TaskError
from paceline.events import nan_to_null
from paceline.files import reason
from paceline.parallel.loss.forward import ELSEWHERE, autocast
from paceline.parallel.loss.global_loss import gather_splits
from paceline.plan.plan import ResolvedPlan
from paceline.sample_rng import number_samples
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checks.rank_checks import check_ranks
from paceline.training.evaluation.evaluate_checkpoint import (
    CheckpointRequest,
    agree_on_plan,
    connected,
    load_checkpoint,
)
from paceline.training.prepared import PreparedTraining
from paceline.user_code import UserCode


@dataclass(frozen=True)
class Prediction:
    """A file with a line of JSON for each sample, in the order of the samples.

    out             the file
    samples         number of its lines
    checkpoint      path of the checkpoint
    step            step of the checkpoint
    plan, ranks     plan and number of ranks
    batch           samples of a batch over all ranks
    seconds         duration, without the start
    notes           damaged checkpoints that were skipped, and what changed since the checkpoint was made
    """

    out: str
    samples: int
    checkpoint: str
    step: int
    plan: str
    ranks: int
    batch: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PredictionRequest:
    """What to predict, and where to write it. The same on all ranks.

    files      in place of the split
    out        the file that the user names
    temporary  the file that rank 0 writes, which replaces `out` if all is well
    """

    source: CheckpointRequest
    split: str
    files: tuple[Path, ...]
    out: Path
    temporary: Path


def predict_from_checkpoint(request: PredictionRequest, world: World) -> Prediction:
    """Predict on all ranks; rank 0 writes the file. A collective.

    Raises DataError if the task has no such split or reads no such files, PlanError, TaskError,
    CheckpointError, and RunError if the file cannot be written.
    """
    spec = request.source.spec
    with connected(request.source, world) as (task, device):
        plan = agree_on_plan(request.source, task, world)
        resolved = plan.resolve(world.size)
        samples = _open(request, task, spec, resolved)
        check_ranks(task, world, {"predict": samples.count})
        # The analysis of tp and pp calls loss(), for which files may have no targets.
        has_targets = not request.files or not resolved.splits_model
        examples = samples if has_targets else open_training_samples(task, spec, resolved)
        loaded = load_checkpoint(request.source, task, resolved, world, examples)
        prepared = loaded.prepared
        began = time.perf_counter()
        workers = workers_per_rank(world.local_size, device, spec.data.workers)
        with prepared.whole_model():
            for number, values in enumerate(_predict(prepared, samples, spec, workers)):
                if world.rank == 0:
                    _write_lines(request, values, "a" if number else "w")
        prepared.release()
    return Prediction(
        out=str(request.out),
        samples=samples.count,
        checkpoint=str(loaded.path),
        step=loaded.step,
        plan=str(plan),
        ranks=world.size,
        batch=spec.batch,
        seconds=time.perf_counter() - began,
        notes=loaded.notes,
    )


def _open(request: PredictionRequest, task: Task, spec: Spec, plan: ResolvedPlan) -> Samples:
    if request.files:
        return open_file_samples(task, request.files, spec, plan)
    samples = open_samples(task, request.split, spec, plan)
    if samples is None:
        raise DataError(
            f"{type(task).__name__}.dataset({request.split!r}) returned None: the task has no such split; "
            "name another with --split, or name files"
        )
    return samples


def _write_lines(request: PredictionRequest, values: Sequence[Any], mode: str) -> None:
    text = "".join(json.dumps(nan_to_null(value), ensure_ascii=False) + "\n" for value in values)
    try:
        with request.temporary.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"cannot write {request.out}: {reason(error)}") from error


@torch.no_grad()
def _predict(prepared: PreparedTraining, samples: Samples, spec: Spec, workers: int) -> Iterator[list[Any]]:
    """Yield the values of the samples of each batch, in their order; on rank 0 alone. A collective."""
    step, batch = prepared.step, spec.batch
    device, ranks = step.device, dist.get_world_size()
    mine = list(validation_parts(samples.count, batch, step.place.dp, step.data_ranks))
    begins = range(0, samples.count, batch)
    # A rank without samples takes part with the first sample of the batch, as in an evaluation.
    parts = [(numbers or [begin], numbers or [begin]) for begin, numbers in zip(begins, mine, strict=True)]
    step.model.eval()
    agree = agree_on_longest(prepared.group, device)
    source = batches(samples, parts, device, workers, spec.data.prefetch, agree=agree)
    with contextlib.closing(source):
        for numbers, data in zip(mine, source, strict=True):
            own: list[Any] = []
            of_batch = number_batch(samples.seed, samples.split, numbers or [0], samples.floats)
            with number_samples([data], [of_batch]):
                output = step.output(data)
                if output is not ELSEWHERE:
                    own = _call_predict(step.task, output, data, len(numbers) or 1, spec.precision, device)
            if not numbers or not step.counts:
                own = []
            # Ranks of one axis need not be in the order of their samples.
            part = step.place.dp, own
            gathered: list[Any] | None = [part] * ranks if dist.get_rank() == 0 else None
            if ranks > 1:
                dist.gather_object(part, gathered)
            by_data_rank = sorted(gathered or (), key=lambda entry: int(entry[0]))
            yield [value for _, values in by_data_rank for value in values]
    if step.pipeline is not None:
        step.pipeline.reshard()


def _call_predict(
    task: Task, output: Any, data: Any, samples: int, precision: str, device: torch.device
) -> list[Any]:
    """Return a value for JSON for each sample of a batch. Raises TaskError."""
    with autocast(precision, device), UserCode("predict()", task.predict):
        values = task.predict(gather_splits(output), data)
    is_output = type(task).predict is Task.predict
    what = "the output of the model" if is_output else "predict()"
    if is_output and not find_tensors(values):
        raise TaskError(f"{what} has no tensors, got {type(values).__name__}; define predict(output, batch)")
    return split_samples(values, samples, what)


def split_samples(values: Any, samples: int, what: str) -> list[Any]:
    """Return the value of each sample: the rows of sequences, or dicts of their rows. Raises TaskError.

    what: returned the values, for messages.
    """
    if isinstance(values, Mapping):
        columns = {
            str(key): split_samples(value, samples, f"{key!r} of {what}") for key, value in values.items()
        }
        return [{key: column[row] for key, column in columns.items()} for row in range(samples)]
    if isinstance(values, tuple) and find_tensors(values):  # what a model returns
        columns_by_place = [split_samples(value, samples, what) for value in values]
        return [list(row) for row in zip(*columns_by_place, strict=True)]
    has_rows = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if hasattr(values, "tolist") and hasattr(values, "shape"):
        has_rows, found = bool(len(values.shape)), f"shape {tuple(values.shape)}"
    else:
        found = f"{len(values)} values" if has_rows else type(values).__name__
    if not has_rows or len(values) != samples:
        raise TaskError(
            f"{what} must have a value for each of the {samples} samples of the batch, got {found}; define "
            "predict(output, batch)"
        )
    return [_to_json(value, what) for value in (_to_list(values))]


def _to_list(values: Any) -> Any:
    if isinstance(values, Tensor) and values.is_complex():
        return list(torch.view_as_real(values).tolist())
    return values.tolist() if hasattr(values, "tolist") else values


def _to_json(value: Any, what: str) -> Any:
    value = _to_list(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, what) for item in value]
    raise TaskError(
        f"{what} has a {type(value).__name__}, which JSON lacks; return text, numbers, lists or dicts"
    )

"""The communication volume of a real training step, compared with the predicted one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from paceline import Spec, Task, train
from paceline.events import Step
from paceline.plan.comm_volume import MODEL, CommVolume
from paceline.plan.plan import parse
from paceline.training import train as train_module
from paceline.training.dry_run.comm_counter import CommCounter
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.prepared import PreparedTraining
from paceline.training.step import step_metrics

Fault = Callable[[PreparedTraining], AbstractContextManager[None]]


def no_fault(training: PreparedTraining) -> AbstractContextManager[None]:
    return nullcontext()


def measure_step(task: Task, spec: Spec, plan: str, fault: Fault = no_fault) -> tuple[CommVolume, list[int]]:
    """Return the volume of the third step on this rank, and the bytes of DDP's buckets."""
    kept: list[PreparedTraining] = []
    build_training = train_module.build_training
    step_metrics.REDUCE_EVERY_S = 0.0  # the metrics of each step are reduced separately

    def keep(*args: Any, **kwargs: Any) -> PreparedTraining:
        training = build_training(*args, **kwargs)
        if training.update.loss_scale is not None:  # a skipped update sends less
            training.update.loss_scale.scale = 1.0
        kept.append(training)
        return training

    train_module.build_training = keep
    try:
        events = train(spec, parse(plan), task=task)
        while not isinstance(next(events), Step):  # it is yielded while step 2 runs
            pass
        with (
            fault(kept[0]),
            CommCounter(kept[0].model, parse(plan).resolve(dist.get_world_size())) as counter,
        ):
            assert isinstance(next(events), Step)
        buckets = _bucket_bytes(kept[0].update.model)
        list(events)
    finally:
        train_module.build_training, step_metrics.REDUCE_EVERY_S = build_training, 0.1
    return counter.volume(), buckets


def _bucket_bytes(model: nn.Module) -> list[int]:
    if not isinstance(model, DistributedDataParallel):
        return []
    log_data = model._get_ddp_logging_data()
    return [
        int(size) for size in (log_data.get("rebuilt_bucket_sizes") or log_data["bucket_sizes"]).split(", ")
    ]


def make_spec(**more: Any) -> Spec:
    return Spec(steps=4, batch=8, seed=3, **more)


def predict_volumes(size: int, plan: str, task: Task, spec: Spec) -> list[CommVolume]:
    """Return the volumes that a dry run predicts for the first and the last rank."""
    return [compute_comm_volume(spec, parse(plan), size, rank, task) for rank in (0, size - 1)]


def check_volumes(size: int, plan: str, task: Task, spec: Spec) -> CommVolume:
    """Check that a real step sends what the dry run predicts. Return the volume of rank 0."""
    results = ranks(size)(measure_step, task, spec, plan)
    expected = predict_volumes(size, plan, task, spec)
    assert [results[0][0], results[-1][0]] == expected
    for volume, buckets in results:  # as DDP reports
        of_model = [entry for entry in volume.of("all-reduce").entries if entry.module == MODEL]
        if buckets:
            assert sum(entry.bytes for entry in of_model) == sum(buckets)
            assert sum(entry.calls for entry in of_model) == len(buckets)
    return expected[0]

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
from paceline.training import loop, step_metrics
from paceline.training.dry_run.comm_counter import CommCounter
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.setup import PreparedTraining

Plant = Callable[[PreparedTraining], AbstractContextManager[None]]


def untouched(laid: PreparedTraining) -> AbstractContextManager[None]:
    return nullcontext()


def counted(task: Task, spec: Spec, plan: str, plant: Plant = untouched) -> tuple[CommVolume, list[int]]:
    """The third step of a training in this rank, and the buckets of its DistributedDataParallel, in bytes."""
    kept: list[PreparedTraining] = []
    lay_out, step_metrics.REDUCE_EVERY_S = loop.build_training, 0.0  # each step is told on its own

    def keep(*args: Any, **kwargs: Any) -> PreparedTraining:
        laid = lay_out(*args, **kwargs)
        if laid.update.loss_scale is not None:  # an update that is left out sends less
            laid.update.loss_scale.scale = 1.0
        kept.append(laid)
        return laid

    loop.build_training = keep
    try:
        events = train(spec, parse(plan), task=task)
        while not isinstance(next(events), Step):  # it comes when step 2 is under way
            pass
        with (
            plant(kept[0]),
            CommCounter(kept[0].model, parse(plan).resolve(dist.get_world_size())) as counter,
        ):
            assert isinstance(next(events), Step)
        buckets = _buckets(kept[0].update.model)
        list(events)
    finally:
        loop.build_training, step_metrics.REDUCE_EVERY_S = lay_out, 0.1
    return counter.volume(), buckets


def _buckets(model: nn.Module) -> list[int]:
    if not isinstance(model, DistributedDataParallel):
        return []
    told = model._get_ddp_logging_data()
    return [int(size) for size in (told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(", ")]


def wanted(**more: Any) -> Spec:
    return Spec(steps=4, batch=8, seed=3, **more)


def foretold(size: int, plan: str, task: Task, spec: Spec) -> list[CommVolume]:
    """Of the first rank and the last."""
    return [compute_comm_volume(spec, parse(plan), size, rank, task) for rank in (0, size - 1)]


def check(size: int, plan: str, task: Task, spec: Spec) -> CommVolume:
    """Of rank 0."""
    found = ranks(size)(counted, task, spec, plan)
    expected = foretold(size, plan, task, spec)
    assert [found[0][0], found[-1][0]] == expected
    for each, buckets in found:  # DDP's own figures
        of_model = [entry for entry in each.of("all-reduce").entries if entry.module == MODEL]
        if buckets:
            assert sum(entry.bytes for entry in of_model) == sum(buckets)
            assert sum(entry.calls for entry in of_model) == len(buckets)
    return expected[0]

"""What one process says that a step sends is what the ranks of a real training send, entry by entry."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import models
from harness import ranks
from paceline import Spec, Task, train
from paceline.events import Step
from paceline.plan.ledger import MODEL, Ledger
from paceline.plan.plan import parse
from paceline.training import figures, loop
from paceline.training.count import Counter
from paceline.training.dry import ledger
from paceline.training.prepare import Laid

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # by torch itself, for zero1
PLANS = ("ddp", "zero1", "zero2", "zero3", "hsdp")


def counted(task: Task, spec: Spec, plan: str, plant: Callable[[], AbstractContextManager[None]] = nullcontext) -> tuple[Ledger, list[int]]:
    """The third step of a training in this rank, and the buckets of its DistributedDataParallel, in bytes."""
    kept: list[Laid] = []
    lay_out, figures.EVERY_S = loop.lay_out, 0.0  # each step is told on its own

    def keep(*args: Any) -> Laid:
        kept.append(lay_out(*args))
        return kept[-1]

    loop.lay_out = keep
    try:
        events = train(spec, parse(plan), task=task)
        while not isinstance(next(events), Step):  # it comes when step 2 is under way
            pass
        with plant(), Counter(kept[0].model, parse(plan).on(dist.get_world_size())) as counter:
            assert isinstance(next(events), Step)
        buckets = _buckets(kept[0].update.model)
        list(events)
    finally:
        loop.lay_out, figures.EVERY_S = lay_out, 0.1
    return counter.ledger(), buckets


def _buckets(model: nn.Module) -> list[int]:
    if not isinstance(model, DistributedDataParallel):
        return []
    told = model._get_ddp_logging_data()
    return [int(size) for size in (told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(", ")]


def wanted(**more: Any) -> Spec:
    return Spec(steps=4, batch=8, seed=3, **more)


def both(size: int, plan: str, task: Task, spec: Spec) -> tuple[list[Ledger], list[Ledger], list[list[int]]]:
    found, buckets = zip(*ranks(size)(counted, task, spec, plan), strict=True)
    return [ledger(spec, parse(plan), size, rank, task) for rank in range(size)], list(found), list(buckets)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("task", [models.Points, models.NormedImages, models.Text])
def test_it_is_what_real_ranks_send(task: type[Task], size: int, plan: str, micro: int) -> None:
    foretold, found, buckets = both(size, f"{plan},micro={micro}", task(), wanted())
    assert found == foretold
    for each, sizes in zip(found, buckets, strict=True):
        if sizes:
            reduced = each.of("all-reduce")
            assert sum(e.bytes for e in reduced.entries if e.module == MODEL and e.bytes in (sum(sizes),)) == sum(sizes)

"""The splits of a task that a training reads: opened, checked, and read through caches."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.data.cache.opening import Caches, open_caches
from paceline.data.open_samples import check_batch, choose_order, open_samples, open_training_samples
from paceline.data.order import Order
from paceline.data.samples import Samples
from paceline.distributed.world import World
from paceline.errors import DataError, PlanError
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.units import several

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class TrainingData:
    """The splits of a task that a training reads."""

    training: Samples
    validation: Samples | None
    order: Order  # of the training split
    others: tuple[Samples, ...] = ()  # that are evaluated besides the validation split
    caches: Caches = field(default_factory=Caches)

    @property
    def samples(self) -> int:
        """Number of samples of an epoch."""
        return self.order.epoch_samples

    @property
    def evaluated(self) -> dict[str, Samples]:
        """The splits that are evaluated, by the prefix of their metrics."""
        validation = {} if self.validation is None else {"": self.validation}
        return validation | {f"{samples.split}/": samples for samples in self.others}

    @property
    def lengths(self) -> dict[str, int]:
        """Number of samples by split."""
        return {
            "train": self.samples,
            "validation": self.validation.count if self.validation is not None else 0,
            **{samples.split: samples.count for samples in self.others},
        }


def open_data(spec: Spec, task: Task, plan: ResolvedPlan | None = None) -> TrainingData:
    """Open both splits. Raises DataError. `plan`: what divides the batches, if it is known."""
    training = open_training_samples(task, spec, plan)
    return TrainingData(
        training=training,
        validation=open_samples(task, "validation", spec, plan),
        order=choose_order(training, spec),
        others=tuple(_open_split(spec, task, split, plan) for split in spec.evaluate_splits),
    )


@contextlib.contextmanager
def use_caches(data: TrainingData, spec: Spec, world: World) -> Iterator[TrainingData]:
    """Read the samples through caches in this context, if the request has them. A collective.

    Raises DataError if they cannot be cached.
    """
    job = [secrets.token_hex(16)]
    if spec.data.cache != "off" and dist.is_initialized():
        dist.broadcast_object_list(job, src=0)
    splits = [data.training, *data.evaluated.values()]
    with open_caches(splits, spec.data, world, job[0], spec.data.workers or 1) as caches:
        yield replace(data, caches=caches)


def _open_split(spec: Spec, task: Task, split: str, plan: ResolvedPlan | None) -> Samples:
    samples = open_samples(task, split, spec, plan)
    if samples is None:
        raise DataError(
            f"evaluate_splits has {split!r}, but {type(task).__name__}.dataset({split!r}) returned None; "
            "return its samples, or leave it out"
        )
    return samples


def check_sample_count(samples: int, plan: ResolvedPlan, batch: int) -> tuple[str, ...]:
    """Return a note if the batch is larger than the training split.

    Raises PlanError if a data rank would have no samples, or if the batch is far too large.
    """
    if plan.dp > samples:
        most = samples * plan.cp * plan.tp * plan.pp + plan.num_servers
        raise PlanError(
            f"{plan.dp} {plan.batch_sharers} for {samples} training samples; use at most --ranks {most}"
        )
    check_batch(batch, samples)
    if batch > samples:
        return (
            f"batch {batch:,} is more than the {several(samples, 'training sample')}: "
            "each step has samples several times",
        )
    return ()

"""A training with parameter servers, from one rank's point of view: one generator for servers and workers."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.process_group import start_timeout_s, workers_per_rank
from paceline.distributed.world import World
from paceline.errors import PlanError
from paceline.events import Ended, Event, Started
from paceline.parallel.apply import ELEMENTWISE
from paceline.parallel.batch_norm import find_running_statistics
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.optimizer import check_schedule
from paceline.training.parameter_server.coordinator import STALENESS, Coordinator, stand_by
from paceline.training.parameter_server.partition import deal
from paceline.training.parameter_server.rpc import Rpc
from paceline.training.parameter_server.server_shard import Shard
from paceline.training.parameter_server.worker import Worker
from paceline.training.setup import PreparedTraining, TrainingData, build_training
from paceline.training.step import TrainingStep

Loop = Callable[
    [ResolvedPlan, World, TrainingData, PreparedTraining, Callable[[], bool]], Any
]  # makes the loop of one process


def train_against_servers(
    spec: Spec,
    plan: ResolvedPlan,
    asked: str,
    world: World,
    task: Task,
    device: torch.device,
    stop: Callable[[], bool],
    data: TrainingData,
    loop: Loop,
    notes: Sequence[str],
) -> Generator[Event]:
    """Yield the events of this rank."""
    if spec.precision == "fp16":
        raise PlanError(
            f"plan {asked} with fp16: each worker would need a loss scale of its own; use bf16 or fp32"
        )
    alone, me = replace(plan, dp=1, servers=None, staleness=None), replace(world, rank=0, size=1)
    laid = build_training(spec, alone, me, task, device)
    model, update, optimizer = laid.model, laid.update, laid.update.optimizer
    assert isinstance(update, TrainingStep)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    dealt = deal(trained, plan.num_servers, by_row=type(optimizer).__name__ in ELEMENTWISE)
    statistics = find_running_statistics(model)
    total = spec.total_steps(data.samples)
    check_schedule(spec.schedule.in_samples(spec.batch, data.samples), total * spec.batch)
    first_alone = dist.new_group([0], backend="gloo")
    transport = Rpc(
        world.rank, world.size, start_timeout_s(spec.timeout_s)
    )  # one that is gone is seen by its connection
    with contextlib.closing(transport):
        if world.rank >= plan.num_servers:
            worker = Worker(model, update, dealt, statistics, plan, world.rank, transport)
            readers = workers_per_rank(world.local_size, device, spec.data.workers)
            step = first = worker.first()
            yield _started(spec, asked, world, model, data, first, total)
            for step in worker.steps(first, total, spec, data.training, data.samples, device, readers, stop):  # noqa: B007
                pass
            yield Ended(step=step, reason="done" if step == total else "stopped")
            return
        shard = Shard(model, optimizer, dealt[world.rank], statistics if world.rank == 0 else {})
        if world.rank:
            yield _started(spec, asked, world, model, data, 0, total)
            stand_by(shard, transport)
            yield Ended(step=shard.version, reason="done" if shard.version == total else "stopped")
            return
        coordinator = Coordinator(
            model, optimizer, shard, dealt, plan, transport, spec.optimizer.clip, spec.timeout_s
        )
        notes = (*notes, *laid.notes, *_notes(plan, statistics))
        served = replace(laid, update=coordinator, servers=coordinator, group=first_alone, notes=notes)
        nothing = replace(data, training=_Nothing())  # type: ignore[arg-type]
        here = loop(
            replace(alone, microbatches=1), me, nothing, served, lambda: stop() or coordinator.stop_wished
        )
        coordinator.begin(here.first)
        yield from coordinator.followed(here.events(), world.size)


class _Nothing:
    """The samples of a server."""

    def __getitem__(self, part: object) -> None:
        return None


def _notes(plan: ResolvedPlan, statistics: dict[str, Tensor]) -> tuple[str, ...]:
    staleness = plan.staleness if plan.staleness is not None else STALENESS
    servers = f"{plan.servers} server{'s' * (plan.servers != 1)}, {plan.dp} worker{'s' * (plan.dp != 1)}"
    stale = f"gradients of weights that may lack {staleness} updates, which is not the update of one process"
    exact = "no gradient is of older weights (staleness=0), so that the update is that of one process"
    note = f"parameter server: {servers}; {stale if staleness else exact}"
    return (
        note,
        *(
            ["BatchNorm takes its statistics from the samples of each worker; the running ones are averaged"]
            if statistics
            else []
        ),
    )


def _started(
    spec: Spec, asked: str, world: World, model: nn.Module, data: TrainingData, step: int, total: int
) -> Started:
    """What a rank tells that is not the first; nobody writes it down."""
    return Started(
        task=spec.task,
        plan=asked,
        ranks=world.size,
        batch=spec.batch,
        step=step,
        steps=total,
        samples=data.samples,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=str(next(model.parameters()).device),
        precision=spec.precision,
        threads=torch.get_num_threads(),
    )

"""Training with parameter servers on one rank: a generator of events for servers and workers."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.process_group import start_timeout_s, workers_per_rank
from paceline.distributed.world import World
from paceline.errors import PlanError
from paceline.events import Ended, Event, Started
from paceline.parallel.data_parallel.batch_norm import find_running_statistics
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.optimization.optimizer_trial import check_independence, updates_elements
from paceline.training.optimization.schedule import check_schedule, resolve_schedule
from paceline.training.parameter_server.coordinator import STALENESS, Coordinator, serve_until_end
from paceline.training.parameter_server.partition import assign_slices
from paceline.training.parameter_server.rpc import Rpc
from paceline.training.parameter_server.server_shard import ServerShard
from paceline.training.parameter_server.worker import Worker
from paceline.training.prepared import PreparedTraining
from paceline.training.setup import build_training
from paceline.training.step.step import TrainingStep
from paceline.training.training_data import TrainingData

# Builds the loop of a single process.
Loop = Callable[[ResolvedPlan, World, TrainingData, PreparedTraining, Callable[[], bool]], Any]


def _check_limits(spec: Spec, plan_name: str) -> None:
    """Raise PlanError for limits of gradients that servers do not apply."""
    optimizer = spec.optimizer
    for key, is_set in (
        ("clip_value", optimizer.clip_value is not None),
        ("agc", optimizer.agc is not None),
        ("on_nan", optimizer.on_nan != "stop"),
    ):
        if is_set:
            raise PlanError(
                f"plan {plan_name} does not support optimizer.{key}={getattr(optimizer, key)}, since servers "
                "have parts of tensors; leave it out, or use another plan"
            )


def train_against_servers(
    spec: Spec,
    plan: ResolvedPlan,
    plan_name: str,
    world: World,
    task: Task,
    device: torch.device,
    stop: Callable[[], bool],
    data: TrainingData,
    loop: Loop,
    notes: Sequence[str],
) -> Generator[Event]:
    """Train on this rank, as a server or a worker. Yield its events."""
    if spec.precision == "fp16":
        raise PlanError(
            f"plan {plan_name} does not support fp16, since each worker would need a separate loss scale; "
            "use bf16 or fp32"
        )
    _check_limits(spec, plan_name)
    single_plan = replace(plan, dp=1, servers=None, staleness=None)
    single_world = replace(world, rank=0, size=1)
    training = build_training(spec, single_plan, single_world, task, device)
    model, update, optimizer = training.model, training.update, training.step.optimizer
    assert isinstance(update, TrainingStep)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_independence(optimizer, plan)
    slices = assign_slices(trained, plan.num_servers, by_row=updates_elements(optimizer))
    statistics = find_running_statistics(model)
    total = spec.total_steps(data.samples)
    check_schedule(resolve_schedule(spec, task, data.samples), total * spec.batch, task)
    group_of_first = dist.new_group([0], backend="gloo")
    # The timeout is long: a rank that ended is noticed by its connection.
    transport = Rpc(world.rank, world.size, start_timeout_s(spec.timeout_s))
    with contextlib.closing(transport):
        if world.rank >= plan.num_servers:
            worker = Worker(model, update, slices, statistics, plan, world.rank, transport)
            readers = workers_per_rank(world.local_size, device, spec.data.workers)
            step = first = worker.wait_for_start()
            yield _make_started_event(spec, plan_name, world, model, data, first, total)
            for step in worker.steps(first, total, spec, data.training, data.order, device, readers, stop):  # noqa: B007
                pass
            yield Ended(step=step, reason="done" if worker.is_done or step == total else "stopped")
            return
        shard = ServerShard(model, optimizer, slices[world.rank], statistics if world.rank == 0 else {})
        if world.rank:
            yield _make_started_event(spec, plan_name, world, model, data, 0, total)
            serve_until_end(shard, transport)
            is_done = shard.is_done or shard.version == total
            yield Ended(step=shard.version, reason="done" if is_done else "stopped")
            return
        coordinator = Coordinator(
            model, optimizer, shard, slices, plan, transport, spec.optimizer.clip, spec.timeout_s
        )
        notes = (*notes, *training.notes, *_describe(plan, statistics))
        coordinated = replace(
            training, update=coordinator, servers=coordinator, group=group_of_first, notes=notes
        )
        no_samples = replace(data, training=_NoSamples())  # type: ignore[arg-type]
        own_loop = loop(
            replace(single_plan, microbatches=1),
            single_world,
            no_samples,
            coordinated,
            lambda: stop() or coordinator.stop_requested,
        )
        coordinator.begin(own_loop.first)
        yield from coordinator.complete_events(own_loop.events(), world.size)


class _NoSamples:
    """The training samples of a server, which reads none."""

    collate = dataset = augmentation = None
    unreadable: Mapping[int, str] = {}

    def receive(self, batch: None) -> None:
        return batch

    def __getitem__(self, part: object) -> None:
        return None


def _describe(plan: ResolvedPlan, statistics: dict[str, Tensor]) -> tuple[str, ...]:
    """Return notes about the training."""
    staleness = plan.staleness if plan.staleness is not None else STALENESS
    servers = f"{plan.servers} server{'s' * (plan.servers != 1)}, {plan.dp} worker{'s' * (plan.dp != 1)}"
    stale = (
        f"gradients may be computed on weights that lack up to {staleness} updates, "
        "so updates differ from those of one process"
    )
    exact = "no weights are stale (staleness=0), so updates equal those of one process"
    note = f"parameter server: {servers}; {stale if staleness else exact}"
    if not statistics:
        return (note,)
    return (note, "BatchNorm uses the statistics of each worker's samples; running statistics are averaged")


def _make_started_event(
    spec: Spec, plan_name: str, world: World, model: nn.Module, data: TrainingData, step: int, total: int
) -> Started:
    """Return the start event of a rank other than the first. It is not written to the run folder."""
    return Started(
        task=spec.task,
        plan=plan_name,
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

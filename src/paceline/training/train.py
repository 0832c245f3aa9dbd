"""train(): the training of one rank, from its start to the last event."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import nn

from paceline import task as tasks
from paceline.distributed import mesh
from paceline.distributed.process_group import (
    SAVE_TIMEOUT_S,
    StartClock,
    choose_device,
    process_group,
    start_timeout_s,
)
from paceline.distributed.world import World, read_world
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import PlanError
from paceline.events import Event
from paceline.parallel.data_parallel.reduced_buffers import check_reduced_buffers
from paceline.parallel.loss.auxiliary_loss import check_auxiliary_loss
from paceline.parallel.loss.global_loss import check_global_loss
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checks.initial_weights import check_initial_weights_once
from paceline.training.checks.rank_checks import check_ranks
from paceline.training.guard.check import check_guard
from paceline.training.histograms.recorder import check_histograms
from paceline.training.loop import TrainingLoop
from paceline.training.model_facts.model_analysis import (
    ModelAnalysis,
    analyze_model,
    build_meta_model,
    check_figures,
)
from paceline.training.optimization.batches import check_batches
from paceline.training.optimization.plateau import check_plateau
from paceline.training.optimization.read_updates import read_updates
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.setup import build_training
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.step.weight_operations import read_operations
from paceline.training.stop_policy import check_stop
from paceline.training.torch_settings import (
    check_precision,
    describe_slow_precision,
    ineffective_options,
    set_free_threads,
    torch_settings,
)
from paceline.training.tracing.step_tracer import check_traced_steps
from paceline.training.training_data import TrainingData, check_sample_count, open_data, use_caches
from paceline.units import parse_duration_s


def train(
    spec: Spec,
    plan: Plan | str | None = None,
    world: World | None = None,
    *,
    task: Task | None = None,
    run: RunFolder | None = None,
    device: str | None = None,
    stop: Callable[[], bool] | None = None,
    observe: Callable[[nn.Module, str, int], None] | None = None,
    notes: Sequence[str] = (),
    elapsed_s: float = 0.0,
    saves: bool = True,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> Generator[Event]:
    """Train as one rank, and yield an event for each thing that happens. All ranks must iterate in step.

    spec: what to train.
    plan: a Plan, or its text on the command line, such as "zero3" [default: single on one rank, ddp on
    several]; "auto": the plan that rank 0 predicts to be the fastest that fits.
    world: which rank this process is [default: read from the environment].
    task: an instance, instead of the task that `spec` names.
    run: where checkpoints are saved. If it has checkpoints, training resumes from the last complete one
    [default: no checkpoints are saved].
    device: "cpu" or "cuda" [default: cuda if it is available].
    stop: called at each step. If it returns True on any rank, all ranks save and end.
    observe: called on every rank with the distributed model, and with ("gradients", step) before or
    ("weights", step) after each update. If the task has `updates`, it is called with ("update", step) before
    each of them, and with ("gradients", step) after the last, with the gradients of all.
    notes: sentences to report at the start.
    elapsed_s: the part of `spec.max_time` that passed before the first event was requested.
    saves: whether checkpoints are saved in `run`; if not, it gets only heartbeats.
    on_error: called with an error that ends the training, while the other ranks are still connected.

    Raises SpecError, PlanError, DataError, TaskError and CheckpointError before the first step, DivergedError
    if the loss is not finite, and CheckpointError at the end if the last checkpoint could not be written.
    """
    world = world if world is not None else read_world()
    stop = stop if stop is not None else (lambda: False)
    plan = _parse_plan(plan, world)
    check_precision(spec)
    clock, began = StartClock(), time.monotonic() - elapsed_s
    with contextlib.ExitStack() as stack:
        heartbeat = stack.enter_context(
            HeartbeatWriter(run, world.rank, world.size, start_timeout_s(spec.timeout_s), SAVE_TIMEOUT_S)
        )
        if task is None:
            task = tasks.load_task(spec.task, spec.set)
        else:
            spec = spec.model_copy(update={"task": tasks.reference_to(task), "set": tasks.field_values(task)})
        torch_device = choose_device(world, device)
        stack.enter_context(torch_settings(spec, world))
        meeting_place = run.path if run is not None else Path("runs")
        stack.enter_context(
            process_group(world, torch_device, spec.timeout_s, meeting_place, len(spec.trace_steps))
        )
        stack.callback(mesh.destroy_meshes)
        stack.push(partial(_report_error, on_error))
        notes = (
            *notes,
            *set_free_threads(spec, world, run, torch_device),
            *ineffective_options(spec, torch_device),
            *describe_slow_precision(spec, torch_device),
        )
        clock.mark("ranks meet")
        if isinstance(plan, str):
            from paceline.training.planning.auto_plan import broadcast_choice

            choice = broadcast_choice(spec, task, world, device)
            plan, notes = choice.plan, (*notes, choice.why)
        context = RankContext(
            spec,
            task,
            plan.resolve(world.size),
            str(plan),
            world,
            torch_device,
            run if saves else None,
            ranks=world.size,
            deadline=began + parse_duration_s(spec.max_time) if spec.max_time is not None else None,
        )
        check_batches(spec, task, context.plan)
        data = stack.enter_context(use_caches(open_data(spec, task, context.plan), spec, world))
        notes = (*notes, *_check_data(context, data))
        clock.mark("data")
        if context.plan.servers is not None:
            training = _train_against_servers(context, data, heartbeat, stop, notes)
        else:
            training = _train_in_step(context, data, heartbeat, stop, observe, notes, clock)
        yield from clock.add_start_times(training)


def _report_error(
    report: Callable[[Exception], None],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    if isinstance(error, Exception):
        report(error)


def _parse_plan(plan: Plan | str | None, world: World) -> Plan | str:
    """Return a Plan, or AUTO."""
    if plan is None:
        return Plan(dp=1) if world.size == 1 else Plan()
    if isinstance(plan, str) and plan != AUTO:
        return parse(plan)
    if not isinstance(plan, (Plan, str)):
        raise PlanError(f"plan must be a Plan or its words, such as 'zero3', got {type(plan).__name__}")
    return plan


def _check_data(context: RankContext, data: TrainingData) -> list[str]:
    """Check what a request requires of its data, and return notes for the user. A collective."""
    spec, plan = context.spec, context.plan
    check_stop(spec, data.evaluated.keys())
    check_plateau(spec, data.evaluated.keys())
    notes = [*check_ranks(context.task, context.world, data.lengths)]
    notes += check_sample_count(data.samples, plan, spec.batch)
    check_traced_steps(spec, plan, spec.total_steps(data.samples))
    notes += check_histograms(spec, plan)
    check_guard(spec, plan, context.requested_plan, context.task, data.training)
    return notes


def _check_initial_weights(context: RankContext, analysis: ModelAnalysis) -> Sequence[str]:
    return check_initial_weights_once(
        context.spec, context.task, analysis.model, analysis.weights, context.world
    )


def _train_in_step(
    context: RankContext,
    data: TrainingData,
    heartbeat: HeartbeatWriter,
    stop: Callable[[], bool],
    observe: Callable[[nn.Module, str, int], None] | None,
    notes: Sequence[str],
    clock: StartClock,
) -> Generator[Event]:
    """Train by a plan whose ranks make each step together."""
    spec, plan, task, device = context.spec, context.plan, context.task, context.device
    analysis = analyze_model(spec, plan, task, device, data.training)
    notes = (*notes, *_check_initial_weights(context, analysis))
    prepared = build_training(spec, plan, context.world, task, device, analysis=analysis)
    prepared = dataclasses.replace(prepared, notes=(*notes, *prepared.notes))
    clock.mark("model")
    if observe is not None:
        prepared.step.observe = partial(observe, prepared.model)
        if isinstance(prepared.update, UpdateSequence):
            prepared.update.observe = prepared.step.observe
    try:
        yield from TrainingLoop(context, data, prepared, heartbeat, stop).events()
    finally:
        prepared.release()


def _train_against_servers(
    context: RankContext,
    data: TrainingData,
    heartbeat: HeartbeatWriter,
    stop: Callable[[], bool],
    notes: Sequence[str],
) -> Generator[Event]:
    """Train by a plan with parameter servers, whose workers make their steps independently."""
    from paceline.training.parameter_server.train import train_against_servers

    spec, task, resolved = context.spec, context.task, context.plan
    read_operations(task, resolved, spec.optimizer)
    check_global_loss(task, resolved)
    check_figures(task, resolved)
    check_auxiliary_loss(task, resolved)
    read_updates(task, resolved)
    analysis = build_meta_model(spec, task)
    check_reduced_buffers(task, resolved, analysis.model)
    notes = (*notes, *_check_initial_weights(context, analysis))

    def build_loop(
        plan: ResolvedPlan,
        world: World,
        data: TrainingData,
        prepared: PreparedTraining,
        stop: Callable[[], bool],
    ) -> TrainingLoop:
        """Build the loop of the first server, which has a plan and a world of one rank."""
        of_server = dataclasses.replace(context, plan=plan, world=world)
        return TrainingLoop(of_server, data, prepared, heartbeat, stop)

    heartbeat.patience_s = None  # servers and workers wait for each other without collectives
    return train_against_servers(
        spec,
        resolved,
        context.requested_plan,
        context.world,
        task,
        context.device,
        stop,
        data,
        build_loop,
        notes,
    )

"""Evaluate a checkpoint of a run on one split, as one rank under any plan. Changes no file of the run."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import task as tasks
from paceline.data.open_samples import open_samples
from paceline.data.samples import Samples
from paceline.distributed import mesh
from paceline.distributed.process_group import (
    choose_device,
    process_group,
    set_collective_timeout,
    start_timeout_s,
    workers_per_rank,
)
from paceline.distributed.world import World
from paceline.errors import CheckpointError, DataError, PlanError, SpecError
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import Launch, Spec, abbreviate
from paceline.task import Task
from paceline.training.checkpoint.identity import describe_changes, describe_identity
from paceline.training.checkpoint.integrity import find_last_complete
from paceline.training.checkpoint.load import check_same_model, load_
from paceline.training.checkpoint.retention import read_scores
from paceline.training.checks.rank_checks import check_ranks
from paceline.training.evaluation.evaluate import evaluate
from paceline.training.init.deferred_init import fill_
from paceline.training.model_facts.model_analysis import ModelAnalysis, analyze_model
from paceline.training.planning.replan import replan
from paceline.training.prepared import PreparedTraining
from paceline.training.setup import build_training
from paceline.training.torch_settings import set_free_threads, torch_settings

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a checkpoint on one split.

    split, samples  name of the split, and its number of samples
    checkpoint      path of the checkpoint
    step            step of the checkpoint
    plan, ranks     plan and number of ranks of the evaluation
    batch           samples of a batch over all ranks
    metrics         means over the split by name: `loss`, and what `Task.metrics` returns
    seconds         duration, without the start
    notes           damaged checkpoints that were skipped, and what changed since the checkpoint was made
    """

    split: str
    samples: int
    checkpoint: str
    step: int
    plan: str
    ranks: int
    batch: int
    metrics: dict[str, float]
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointRequest:
    """Which checkpoint to load, and under which plan. The same on all ranks.

    spec    request of the run; its batch is that of the evaluation
    steps   steps of the checkpoints that may be loaded; the last complete one is
    plan    text of the plan, or "auto"
    """

    run: RunFolder
    spec: Spec
    steps: Sequence[int]
    plan: str
    device: str | None


def select_checkpoints(run: RunFolder, which: str, best: str) -> list[int]:
    """Return the steps of the checkpoints that `which` names; of several, the last complete one counts.

    which: "best", "last" or a step. best: `save.best` of the run. Raises CheckpointError if there is no such
    checkpoint, and SpecError for other words.
    """
    match = re.fullmatch(r"(?:step_)?(\d{1,18})", which, re.ASCII)  # step_40: the name of its folder
    if which not in (BEST, LAST) and match is None:
        raise SpecError(f"--checkpoint must be best, last or a step, got {abbreviate(which)}")
    steps = run.checkpoints()
    if not steps:
        raise CheckpointError(
            f"{run.path} has no complete checkpoint; continue it with: paceline resume {run.path}"
        )
    if which == LAST:
        return steps
    listed = f"steps with a checkpoint: {', '.join(map(str, steps))}"
    if which == BEST:
        scores = read_scores(run, best)
        if not scores:
            raise CheckpointError(
                f"{run.path} has no best checkpoint: none was saved with the metric of save.best={best!r}; "
                f"use --checkpoint last or a step; {listed}"
            )
        return [min(scores, key=scores.__getitem__)]
    assert match is not None
    step = int(match[1])
    if step not in steps:
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; {listed}")
    return [step]


def choose_plan_text(spec: Spec, before: Launch, launch: Launch, requested: str | None) -> str:
    """Return the plan of an evaluation on `launch.ranks` ranks.

    before: how the run was trained. requested: the plan that the user names; None: that of the run, or the
    most similar if the ranks are others. Raises PlanError.
    """
    default = "single" if launch.ranks == 1 else "ddp"
    if requested is not None:
        if requested != AUTO and parse(requested).servers is not None:
            raise PlanError(
                f"plan {requested} has servers, which evaluate no samples; use --plan {default}, which reads "
                "the same checkpoint"
            )
        return requested
    if before.plan not in (None, AUTO) and parse(before.plan).servers is not None:
        return default
    return (before.plan if launch.ranks == before.ranks else replan(spec, before, launch).plan) or default


@contextlib.contextmanager
def connected(request: CheckpointRequest, world: World) -> Iterator[tuple[Task, torch.device]]:
    """Connect the ranks that use a checkpoint in this context. Yields the task of the run and the device.

    Settings and threads are those of the training, so that sums round the same.
    """
    spec, run = request.spec, request.run
    task = tasks.load_task(spec.task, spec.set)
    device = choose_device(world, request.device)
    # A launcher without a store needs a folder that all ranks see; that of the run must not change.
    meeting_place = run.path.absolute().parent
    with torch_settings(spec, world), process_group(world, device, spec.timeout_s, meeting_place):
        set_collective_timeout(start_timeout_s(spec.timeout_s))
        set_free_threads(spec, world, run, device)
        try:
            yield task, device
        finally:
            mesh.destroy_meshes()


def evaluate_checkpoint(request: CheckpointRequest, split: str, world: World) -> Evaluation:
    """Evaluate a split on this rank, and return the same metrics on all ranks. A collective.

    Raises DataError if the task has no such split, PlanError, TaskError and CheckpointError.
    """
    spec = request.spec
    with connected(request, world) as (task, device):
        plan = agree_on_plan(request, task, world)
        resolved = plan.resolve(world.size)
        samples = open_samples(task, split, spec, resolved)
        if samples is None:
            raise DataError(
                f"{type(task).__name__}.dataset({split!r}) returned None: the task has no such "
                "split; name another with --split, or return its samples"
            )
        check_ranks(task, world, {split: samples.count})
        loaded = load_checkpoint(request, task, resolved, world, samples)
        prepared = loaded.prepared
        began = time.perf_counter()
        with prepared.whole_model():
            metrics = evaluate(
                prepared.step,
                samples,
                spec.batch,
                workers_per_rank(world.local_size, device, spec.data.workers),
                spec.data.prefetch,
                prepared.group,
            )
        assert metrics is not None  # nothing asks to stop
        prepared.release()
    return Evaluation(
        split=split,
        samples=samples.count,
        checkpoint=str(loaded.path),
        step=loaded.step,
        plan=str(plan),
        ranks=world.size,
        batch=spec.batch,
        metrics=metrics,
        seconds=time.perf_counter() - began,
        notes=loaded.notes,
    )


def agree_on_plan(request: CheckpointRequest, task: Task, world: World) -> Plan:
    """Return the plan of a request; all ranks choose the same if it is "auto"."""
    if request.plan != AUTO:
        return parse(request.plan)
    from paceline.training.planning.auto_plan import broadcast_choice

    return broadcast_choice(request.spec, task, world, request.device).plan


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The model of a checkpoint under a plan.

    notes: damaged checkpoints that were skipped, and what changed since the checkpoint was made.
    """

    prepared: PreparedTraining
    path: Path
    step: int
    notes: tuple[str, ...]


def load_checkpoint(
    request: CheckpointRequest,
    task: Task,
    plan: ResolvedPlan,
    world: World,
    samples: Samples,
    adapt: Callable[[ModelAnalysis], ModelAnalysis] = lambda analysis: analysis,
) -> LoadedCheckpoint:
    """Return the model of a checkpoint. A collective.

    samples: from which the analysis of the model takes a batch. adapt: changes this analysis.
    Raises PlanError, TaskError and CheckpointError.
    """
    run, device = request.run, choose_device(world, request.device)
    steps = [request.steps]
    if world.size > 1:  # a training that runs meanwhile may save and delete checkpoints
        dist.broadcast_object_list(steps, src=0)
    path, index, notes = find_last_complete(run, world.rank, world.size, steps[0])
    if path is None or index is None:
        raise CheckpointError(f"{run.path} has no complete checkpoint to load: {'; '.join(notes)}")
    # Evaluation divides any batch among the ranks; the analysis of the model needs a batch of a training,
    # with two samples in each part because of BatchNorm.
    parts = plan.dp * plan.microbatches
    batch = parts * max(2, min(request.spec.batch, samples.count) // parts)
    spec = request.spec.model_copy(update={"batch": batch})
    analysis = adapt(analyze_model(spec, plan, task, device, samples))
    # Buffers that are not in the checkpoint keep their initial values.
    fill = partial(fill_, weights=analysis.weights, device=device)
    prepared = build_training(spec, plan, world, task, device, fill_with=fill, analysis=analysis)
    check_same_model(path, index, spec.task, spec.set, prepared.model)
    assert prepared.operations is not None
    averages = prepared.operations.state()
    if not load_(path, prepared.model, (), group=prepared.group, averages=averages):
        prepared.operations.restart_averages()
        notes.append(f"{path} has no averages of all these weights; its weights are used")
    identity = describe_identity(spec, task, prepared.modules, prepared.optimizers)
    if changes := describe_changes(index.identity, identity):
        notes.append(f"the task differs from the training at step {index.step}: {'; '.join(changes)}")
    return LoadedCheckpoint(prepared, path, index.step, tuple(notes))

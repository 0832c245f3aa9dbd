"""Dry run of a training step: one process takes the role of any rank, and counts what the step would send.

It sends nothing and computes no values.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import choose_order, open_training_samples
from paceline.data.samples import Batch
from paceline.distributed import mesh
from paceline.distributed.world import World
from paceline.errors import LaunchError, PlanError, TaskError
from paceline.parallel.tensor.tracer import silence_fake_tensor_errors
from paceline.plan.comm_volume import CommVolume
from paceline.plan.plan import Plan, ResolvedPlan, micro_batch_size
from paceline.spec import Spec
from paceline.task import Task, load_task, read_layout
from paceline.torch_compat import complete_fake_buckets, make_fake_mode
from paceline.training.dry_run.comm_counter import CommCounter
from paceline.training.dry_run.identical_stages import find_identical_places
from paceline.training.dry_run.microbatch_replay import (
    RUNS_TO_COUNT,
    RUNS_TO_SETTLE,
    are_microbatches_identical,
    replay_microbatches,
)
from paceline.training.init.deferred_init import allocate_
from paceline.training.model_facts.model_analysis import ModelAnalysis, analyze_model
from paceline.training.prepared import PreparedTraining
from paceline.training.setup import build_training
from paceline.training.step.ddp_warmup import warm_up_ddp
from paceline.training.step.loss_scale import LossScale
from paceline.training.step.step import TrainingStep
from paceline.training.step.step_metrics import ControlFlags, reduce_metrics_async
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.training_data import check_sample_count

CPU = torch.device("cpu")
# Raised where a model needs the values of tensors that have none.
VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
# Steps after which engines have settled: DDP has its buckets, fully_shard the order in which it gathers.
WARM_UP_STEPS = 1


def compute_comm_volume(
    spec: Spec, plan: Plan, ranks: int, rank: int = 0, task: Task | None = None
) -> CommVolume:
    """Return what `rank` of `ranks` sends in one training step under `plan`.

    The step is that of `train`, with its engines, on a fake process group and on tensors without memory
    (torch's FakeTensorMode). Samples are real, and so are values that depend on them alone. The metrics
    of the step are reduced separately; a real training reduces those of several quick steps together, in
    fewer calls. The model is not compiled: compilation sends nothing.

    Raises PlanError, DataError or TaskError as a training would, and TaskError for a model that needs the
    values of its tensors.
    """
    inputs = _prepare(spec, plan, ranks, task)
    return _simulate_rank(inputs, World(rank=rank, size=ranks), inputs.analysis)


def compute_stage_volumes(spec: Spec, plan: Plan, ranks: int, task: Task | None = None) -> list[CommVolume]:
    """Return the volume of the first rank of each place of a pipeline; other ranks of a place send the same.

    Arguments and errors are those of `compute_comm_volume`.
    """
    inputs = _prepare(spec, plan, ranks, task)
    places = find_identical_places(inputs.plan, read_layout(inputs.task), inputs.analysis)
    first_ranks = [place * inputs.plan.ranks_per_stage for place in range(plan.pp)]
    volumes = {
        at: _simulate_rank(inputs, World(rank=first_ranks[at], size=ranks), inputs.analysis.copy_model())
        for at in sorted({identical.place for identical in places})
    }
    return [
        identical.translate(volumes[identical.place], rank)
        for identical, rank in zip(places, first_ranks, strict=True)
    ]


@dataclass(frozen=True)
class _DryRunInputs:
    spec: Spec
    plan: ResolvedPlan
    task: Task
    analysis: ModelAnalysis


def _prepare(spec: Spec, plan: Plan, ranks: int, task: Task | None) -> _DryRunInputs:
    spec = spec.model_copy(update={"compile": False})
    if plan.is_asynchronous:
        raise PlanError(
            f"plan {plan}: paceline comms counts one step, and the steps of this plan are not equal; "
            "use a plan with equal steps, such as ddp"
        )
    if plan.pp > 1 and plan.cp > 1:
        raise PlanError(
            f"plan {plan}: with pp and cp, ranks make trial passes to find what crosses the cuts, and "
            "paceline comms starts no ranks; use pp or cp alone, or count a step of a training "
            "(docs/comms.md)"
        )
    resolved = plan.resolve(ranks)
    micro_batch_size(spec.batch, resolved)
    task = task if task is not None else load_task(spec.task, spec.set)
    return _DryRunInputs(spec, resolved, task, analyze_model(spec, resolved, task, CPU))


def _simulate_rank(inputs: _DryRunInputs, world: World, analysis: ModelAnalysis) -> CommVolume:
    spec, plan, task = inputs.spec, inputs.plan, inputs.task
    with _fake_group(world.rank, world.size), contextlib.ExitStack() as stack:
        microbatches = _load_microbatches(spec, plan, world, task)
        mode = make_fake_mode()

        def fill(model: nn.Module, **where: Any) -> None:
            # The mode starts only here: what is built earlier, such as meshes, needs real numbers.
            stack.enter_context(mode)
            stack.enter_context(RealInputsMode())
            allocate_(model, CPU, **where)

        training = build_training(spec, plan, world, task, CPU, fill, analysis=analysis)
        stack.enter_context(silence_fake_tensor_errors())  # cp tries which arguments it can split
        try:
            return _count_step(training, plan, microbatches)
        except TaskError as error:
            if not isinstance(value_error := error.__cause__, VALUE_ERRORS):
                raise
            raise TaskError(
                f"{type(task).__name__} uses values that depend on its weights, in {value_error.func}, and "
                "paceline comms computes no values; count a step of a training instead (docs/comms.md)"
            ) from value_error
        finally:
            training.release()
            mesh.destroy_meshes()


def _count_step(training: PreparedTraining, plan: ResolvedPlan, microbatches: list[Batch]) -> CommVolume:
    update = training.update
    assert isinstance(update, TrainingStep | UpdateSequence)
    if update.loss_scale is not None:
        update.loss_scale = _NoOverflow()
    for step in update.steps if isinstance(update, UpdateSequence) else [update]:
        if step.skips_nan:  # without values, every gradient counts as finite
            step.loss_scale, step.skips_nan = _NoOverflow(), False
    passes: list[tuple[str, TrainingStep, contextlib.AbstractContextManager[None]]] = (
        [(of_pass.losses_name, of_pass.steps[0], of_pass.frozen_others()) for of_pass in update.passes]
        if isinstance(update, UpdateSequence)
        else [("", update, contextlib.nullcontext())]
    )
    for _, lead, frozen in passes:
        complete_fake_buckets(lead.model)
        with frozen:
            settled = warm_up_ddp(lead, microbatches[0])
        if settled is not lead.model:
            complete_fake_buckets(settled)
        lead.model = settled
    counter = CommCounter(training.model, plan)
    for run in range(WARM_UP_STEPS + 1):
        is_counted = run == WARM_UP_STEPS
        runs = min(RUNS_TO_COUNT if is_counted else RUNS_TO_SETTLE, plan.microbatches)
        with (
            replay_microbatches(counter, plan.microbatches, runs)
            if are_microbatches_identical(plan) and training.step.auxiliary is None  # which needs all of them
            else contextlib.nullcontext(),
            counter if is_counted else contextlib.nullcontext(),
        ):
            local = update(
                microbatches, update.first_whole_step if isinstance(update, UpdateSequence) else run, 1.0
            )
            names = {name: sorted(lead.named.sums) for name, lead, _ in passes}
            reduce_metrics_async([local], ControlFlags(), 0.0, dist.get_world_size(), update.device, names)
    return counter.volume()


def _load_microbatches(spec: Spec, plan: ResolvedPlan, world: World, task: Task) -> list[Batch]:
    """Return the micro-batches of the first step."""
    samples = open_training_samples(task, spec, plan)
    check_sample_count(samples.count, plan, spec.batch)
    parts = training_parts(
        RankBatchSlice(spec.batch, plan.microbatches, plan.place(world.rank).dp, plan.dp),
        choose_order(samples, spec),
        0,
        1,
    )
    return list(batches(samples, parts, CPU, 0, 1, plan.microbatches))


@contextlib.contextmanager
def _fake_group(rank: int, ranks: int) -> Iterator[None]:
    """Use torch's fake process group, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise LaunchError(
            "this process is already a rank; compute volumes in a process without a process group"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _NoOverflow(LossScale):
    """A loss scale under which every gradient counts as finite."""

    def is_finite(self, norm: Tensor) -> bool:
        return True


class RealInputsMode(TorchDispatchMode):
    """Keep tensors real that depend on real tensors alone, so that a task may look at its samples.

    Integer tensors stay real too: engines and models keep their books in them. All others have no memory.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if FakeTensor in types:
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if any(tensor.is_meta for tensor in inputs):
            return func(*args, **kwargs)
        if not inputs:
            created = func(*args, **kwargs)
            if all(tensor.is_floating_point() or tensor.is_complex() for tensor in _tensors(created)):
                return created
        with unset_fake_temporarily():
            # The stages of a pipeline ask each other whether all shapes are known, which they are.
            if func is torch.ops.c10d.recv_.default:
                args[0][0].fill_(1)
            return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

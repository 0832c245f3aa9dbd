"""A training step that sends and computes nothing: one process plays a rank among any number of them, and counts what it would send."""

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
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.data.loader import Batch, RankBatchSlice, Samples, batches, open_dataset, training_parts
from paceline.distributed import mesh
from paceline.distributed.world import World
from paceline.errors import LaunchError, PlanError, TaskError
from paceline.parallel.ddp import release
from paceline.parallel.tensor.tracer import silence_fake_tensor_errors
from paceline.plan.comm_volume import CommVolume
from paceline.plan.plan import Plan, share
from paceline.spec import Spec
from paceline.task import Task, layout_of, load_task
from paceline.training.ddp_warmup import settle
from paceline.training.dry_run.comm_counter import CommCounter
from paceline.training.dry_run.identical_stages import twins
from paceline.training.dry_run.microbatch_replay import TO_COUNT, TO_SETTLE, are_alike, replayed
from paceline.training.init.deferred_init import allocate_
from paceline.training.setup import (
    ModelAnalysis,
    PreparedTraining,
    analyze_model,
    build_training,
    check_enough,
)
from paceline.training.step import LossScale
from paceline.training.step_metrics import ControlFlags, reduce_metrics_async

CPU = torch.device("cpu")
UNTOLD = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)  # what a model asks of values that are not there
WARM_UP = 1  # steps after which engines have settled: DDP's buckets, the order in which fully_shard gathers


def comm_volume(spec: Spec, plan: Plan, ranks: int, rank: int = 0, task: Task | None = None) -> CommVolume:
    """What `rank` of so many sends in one training step under `plan`.

    The step is that of `train`, engines included, on a fake process group and on tensors without memory (torch's FakeTensorMode);
    samples and what is computed from them alone are real. The figures of a step are told on their own: quick steps of a real
    training tell theirs together, and so in fewer calls. Compilation is left out: it sends nothing.

    Raises PlanError, DataError or TaskError as a training would, and TaskError for a model that looks at the values of its tensors.
    """
    asked = _ask(spec, plan, ranks, task)
    return _play(asked, World(rank=rank, size=ranks), asked.studied)


def stages(spec: Spec, plan: Plan, ranks: int, task: Task | None = None) -> list[CommVolume]:
    """The same of the first rank of each place on the axis of a pipeline; other ranks of a place send the same."""
    asked = _ask(spec, plan, ranks, task)
    places = twins(asked.plan, layout_of(asked.task), asked.studied)
    first = [place * asked.plan.copies for place in range(plan.pp)]
    played = {
        at: _play(asked, World(rank=first[at], size=ranks), asked.studied.again())
        for at in sorted({twin.place for twin in places})
    }
    return [twin.told_here(played[twin.place], rank) for twin, rank in zip(places, first, strict=True)]


@dataclass(frozen=True)
class _Asked:
    spec: Spec
    plan: Plan  # its data degree said
    task: Task
    studied: ModelAnalysis


def _ask(spec: Spec, plan: Plan, ranks: int, task: Task | None) -> _Asked:
    spec = spec.model_copy(update={"compile": False})
    if plan.is_asynchronous:
        raise PlanError(
            f"the steps of plan {plan} are not alike, and paceline comms is of one of them: use a plan of which all are, such as ddp"
        )
    if plan.pp > 1 and plan.cp > 1:
        raise PlanError(
            f"plan {plan}: where sequences are split in a pipeline, ranks try out what crosses its cuts, and paceline comms starts none; "
            "use pp or cp alone, or count a step of a training (docs/comms.md)"
        )
    plan = plan.on(ranks)
    share(spec.batch, plan)
    task = task if task is not None else load_task(spec.task, spec.set)
    return _Asked(spec, plan, task, analyze_model(spec, plan, task, CPU))


def _play(asked: _Asked, world: World, studied: ModelAnalysis) -> CommVolume:
    spec, plan, task = asked.spec, asked.plan, asked.task
    with _fake_group(world.rank, world.size), contextlib.ExitStack() as stack:
        micro_batches = _micro_batches(spec, plan, world, task)
        mode = without_memory()

        def fill(
            model: nn.Module, **where: Any
        ) -> None:  # what is built before it, such as meshes, needs real numbers
            stack.enter_context(mode)
            stack.enter_context(_Dry())
            allocate_(model, CPU, **where)

        laid = build_training(spec, plan, world, task, CPU, fill, studied=studied)
        stack.enter_context(silence_fake_tensor_errors())  # cp tries out which arguments to cut
        try:
            return _count(laid, plan, micro_batches)
        except TaskError as error:
            if not isinstance(asked_for := error.__cause__, UNTOLD):
                raise
            raise TaskError(
                f"{type(task).__name__} looks at values that come of its weights, with {asked_for.func}, and paceline comms computes none: "
                "what is sent may depend on them"
            ) from asked_for
        finally:
            release(laid.step.model)
            mesh.destroy_meshes()


def without_memory() -> FakeTensorMode:
    """In it tensors have shapes and no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It remembers what it made by weak references, and torch swaps no tensor that has one, as stages of a pipeline do (torch 2.13).
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


def _count(laid: PreparedTraining, plan: Plan, micro_batches: list[Batch]) -> CommVolume:
    update = laid.step
    if update.loss_scale is not None:
        update.loss_scale = _Fitting()
    _complete(update.model)
    settled = settle(update, micro_batches[0])
    if settled is not update.model:
        _complete(settled)
    update.model = settled
    counter = CommCounter(laid.model, plan)
    assert plan.microbatches is not None
    for step in range(WARM_UP + 1):
        counts = step == WARM_UP
        played = min(TO_COUNT if counts else TO_SETTLE, plan.microbatches)
        with (
            replayed(counter, plan.microbatches, played) if are_alike(plan) else contextlib.nullcontext(),
            counter if counts else contextlib.nullcontext(),
        ):
            local = update(micro_batches, step, 1.0)
            reduce_metrics_async([local], ControlFlags(), 0.0, dist.get_world_size(), update.device)
    return counter.volume()


def _micro_batches(spec: Spec, plan: Plan, world: World, task: Task) -> list[Batch]:
    """Those of the first step."""
    assert plan.dp is not None
    assert plan.microbatches is not None
    dataset = open_dataset(task, "train")
    assert dataset is not None
    check_enough(len(dataset), plan, spec.batch)
    parts = training_parts(
        RankBatchSlice(spec.batch, plan.microbatches, plan.place(world.rank).dp, plan.dp),
        len(dataset),
        spec.seed,
        0,
        1,
    )
    samples = Samples(dataset, "train", spec.seed, torch.float64 if spec.precision == "fp64" else None)
    return list(batches(samples, parts, CPU, workers=0, prefetch=1))


@contextlib.contextmanager
def _fake_group(rank: int, ranks: int) -> Iterator[None]:
    """torch's process group that talks to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise LaunchError(
            "this process is a rank already; paceline comms plays one in a process without a process group"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _complete(model: nn.Module) -> None:
    """DDP's buckets come back at once: what torch's fake process group promises has no tensors in it (torch 2.13)."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)


class _Fitting(LossScale):
    """Nothing overflows."""

    def is_finite(self, norm: Tensor) -> bool:
        return True


class _Dry(TorchDispatchMode):
    """What is made of real tensors alone is real, so that a task may look at its samples, and so are whole numbers, with which
    engines and models keep their books. The rest has no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if FakeTensor in types:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        if not given:
            made = func(*args, **kwargs)
            if all(tensor.is_floating_point() or tensor.is_complex() for tensor in _tensors(made)):
                return made
        with unset_fake_temporarily():
            if (
                func is torch.ops.c10d.recv_.default
            ):  # the stages of a pipeline ask each other whether all shapes are said: they are
                args[0][0].fill_(1)
            return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

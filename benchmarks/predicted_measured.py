"""What trainings take on this machine, measured on real ranks: seconds of a step, and bytes of tensors at the peak."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline import Task
from paceline.bench.compute import engine_overhead
from paceline.data.loader import RankBatchSlice, batches, training_parts
from paceline.distributed.dtensor import storage_id
from paceline.distributed.process_group import keep_freed_memory
from paceline.distributed.world import read_world
from paceline.errors import Error
from paceline.launch.rank_pool import Ranks
from paceline.parallel.ddp import release
from paceline.plan.plan import Plan, micro_batch_size, parse
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.ddp_warmup import warm_up_ddp
from paceline.training.model_analysis import validate_plan
from paceline.training.setup import build_training, open_data

CPU = torch.device("cpu")
COUNTED = 3  # steps whose tensors are counted: engines have settled in the second


def possible(spec: Spec, task: Task, ranks: int) -> Iterator[Plan]:
    """The plans that this task can be trained with, before any rank is started."""
    for plan in enumerate_candidates(ranks):
        try:
            on = plan.resolve(ranks)
            micro_batch_size(spec.batch, on)
            validate_plan(spec, on, task)
        except Error:
            continue
        yield plan


def step_s(ranks: Ranks, spec: Spec, plan: Plan, seconds: float) -> float:
    """Median of the steps that fit into so many seconds."""
    return float(
        ranks(
            engine_overhead.time_training_step,
            spec,
            str(plan),
            seconds,
            ranks.pids,
            timeout_s=120 + 20 * seconds,
        )[0]
    )


def peak_bytes(ranks: Ranks, spec: Spec, plan: Plan) -> list[int]:
    """Of each rank."""
    return [int(found) for found in ranks(_counted, spec, str(plan), timeout_s=180)]


def _training_only(task: Task) -> Task:
    """Without its validation, so that only steps are timed."""
    dataset = type(task).dataset
    object.__setattr__(task, "dataset", lambda split: dataset(task, split) if split == "train" else None)
    return task


def _counted(spec: Spec, plan: str) -> int:
    """The most that tensors of this rank took at once, of those that a training makes."""
    keep_freed_memory()
    me = read_world()
    task = _training_only(load_task(spec.task, spec.set))
    on = parse(plan).resolve(me.size)
    torch.set_num_threads(1)  # they do not change what tensors take
    data = open_data(spec, task)
    assert on.dp is not None
    assert on.microbatches is not None
    parts = training_parts(
        RankBatchSlice(spec.batch, on.microbatches, on.place(me.rank).dp, on.dp),
        data.samples,
        spec.seed,
        0,
        COUNTED,
    )
    there = set(_storages())
    laid = build_training(spec, on, me, task, CPU, training=data.training)
    with Counted(storage for memory, storage in _storages().items() if memory not in there) as counted:
        source = batches(data.training, parts, CPU, 0, spec.data.prefetch)
        for step in range(COUNTED):
            micro_batches = [next(source) for _ in range(on.microbatches)]
            if step == 0:
                laid.step.model = warm_up_ddp(laid.step, micro_batches[0])
            laid.step(micro_batches, step, 1.0)
    release(laid.step.model)
    return counted.most


class Counted(TorchDispatchMode):
    """The most bytes of tensors at once, without fake ones. (torch.profiler does not see what gloo's threads let go of, torch 2.13.)"""

    def __init__(self, there: Iterable[Any]):
        super().__init__()
        self.found = {storage._cdata: storage._weak_ref() for storage in there}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does with local tensors comes here one by one
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                type(leaf) in (Tensor, torch.nn.Parameter)
                and not leaf.is_meta
                and (memory := storage_id(leaf)) not in self.found
            ):
                self.found[memory] = leaf.untyped_storage()._weak_ref()
        self.most = max(self.most, sum(self._sizes()))
        return result

    def _sizes(self) -> Iterator[int]:
        for memory, weak in list(self.found.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self.found[memory]
            else:
                yield storage.nbytes()


def _storages() -> dict[int, Any]:
    """The memory of all tensors that Python knows."""
    found = [
        thing
        for thing in gc.get_objects()
        if type(thing) in (Tensor, torch.nn.Parameter) and not thing.is_meta
    ]
    return {storage_id(tensor): tensor.untyped_storage() for tensor in found}

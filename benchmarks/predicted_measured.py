"""Step time and peak tensor memory of trainings on this machine, measured on real ranks."""

import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline import Task
from paceline.bench.compute.engine_overhead import time_training_step
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.distributed.dtensor import storage_id
from paceline.distributed.process_group import keep_freed_memory
from paceline.distributed.shared_exchange import find_exchange
from paceline.distributed.world import read_world
from paceline.errors import Error
from paceline.launch.rank_pool import Ranks
from paceline.parallel.data_parallel.ddp import release
from paceline.plan.plan import Plan, micro_batch_size, parse
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.model_facts.model_analysis import validate_plan
from paceline.training.setup import build_training
from paceline.training.step.ddp_warmup import warm_up_ddp
from paceline.training.training_data import open_data

CPU = torch.device("cpu")
COUNTED_STEPS = 3  # engines have allocated everything by the second


def possible_plans(spec: Spec, task: Task, ranks: int) -> Iterator[Plan]:
    """Yield the plans with which this task can be trained; no rank is started."""
    for plan in enumerate_candidates(ranks):
        try:
            resolved = plan.resolve(ranks)
            micro_batch_size(spec.batch, resolved)
            validate_plan(spec, resolved, task)
        except Error:
            continue
        yield plan


def measure_step_s(ranks: Ranks, spec: Spec, plan: Plan, seconds: float) -> float:
    """Return the median time of the steps that fit into `seconds`."""
    timeout_s = 120 + 20 * seconds
    return float(ranks(time_training_step, spec, str(plan), seconds, ranks.pids, timeout_s=timeout_s)[0])


def measure_peak_bytes(ranks: Ranks, spec: Spec, plan: Plan) -> list[int]:
    """Return the peak bytes of tensors on each rank."""
    return [int(peak) for peak in ranks(_count_peak_bytes, spec, str(plan), timeout_s=180)]


def _without_validation(task: Task) -> Task:
    """Remove the validation split, so that only steps are measured."""
    dataset = type(task).dataset
    object.__setattr__(task, "dataset", lambda split: dataset(task, split) if split == "train" else None)
    return task


def _count_peak_bytes(spec: Spec, plan: str) -> int:
    """Return the peak bytes of the tensors that a training creates on this rank."""
    keep_freed_memory()
    me = read_world()
    task = _without_validation(load_task(spec.task, spec.set))
    on = parse(plan).resolve(me.size)
    torch.set_num_threads(1)  # threads do not change the memory of tensors
    data = open_data(spec, task)
    parts = training_parts(
        RankBatchSlice(spec.batch, on.microbatches, on.place(me.rank).dp, on.dp),
        data.order,
        0,
        COUNTED_STEPS,
    )
    find_exchange()  # its memory belongs to all ranks, and only what they write to it exists
    existing = set(_storages())
    prepared = build_training(spec, on, me, task, CPU, training=data.training)
    new = (storage for storage_key, storage in _storages().items() if storage_key not in existing)
    with TensorMemoryCounter(new, existing) as counter:
        source = batches(data.training, parts, CPU, 0, spec.data.prefetch)
        for step in range(COUNTED_STEPS):
            micro_batches = [next(source) for _ in range(on.microbatches)]
            if step == 0:
                prepared.step.model = warm_up_ddp(prepared.step, micro_batches[0])
            prepared.step(micro_batches, step, 1.0)
    release(prepared.step.model)
    return counter.peak_bytes


class TensorMemoryCounter(TorchDispatchMode):
    """Peak bytes of real tensors, without those in the storages `ignored`.

    torch 2.13: torch.profiler does not see memory that gloo's threads release.
    """

    def __init__(self, existing: Iterable[Any], ignored: Collection[int] = ()):
        super().__init__()
        self.ignored = ignored
        self.storages = {storage._cdata: storage._weak_ref() for storage in existing}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operations on local tensors are dispatched here separately
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                type(leaf) in (Tensor, torch.nn.Parameter)
                and not leaf.is_meta
                and (key := storage_id(leaf)) not in self.storages
                and key not in self.ignored
            ):
                self.storages[key] = leaf.untyped_storage()._weak_ref()
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes()))
        return result

    def _sizes(self) -> Iterator[int]:
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self.storages[key]
            else:
                yield storage.nbytes()


def _storages() -> dict[int, Any]:
    """Return the storages of all tensors that Python tracks."""
    tensors = [
        item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter) and not item.is_meta
    ]
    return {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}

"""A dispatch mode that counts the collectives of a rank, with their axis and module."""

import itertools
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.distributed.dtensor import is_dtensor, is_materialized, storage_id
from paceline.parallel.pipeline.stage import name_of
from paceline.plan.comm_volume import MODEL, PACELINE, CommVolume, axis_of, sum_entries
from paceline.plan.plan import ResolvedPlan
from paceline.training.dry_run.module_tracker import ModuleTracker

# Operator -> collective, index of the argument whose bytes count, and whether it is one rank's part of S.
C10D = {
    "allreduce_": ("all-reduce", 0, False),
    "allreduce_coalesced_": ("all-reduce", 0, False),
    "broadcast_": ("broadcast", 0, False),
    "reduce_": ("reduce", 0, False),
    "allgather_": ("all-gather", 0, False),
    "_allgather_base_": ("all-gather", 0, False),
    "allgather_coalesced_": ("all-gather", 0, False),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, False),
    "reduce_scatter_": ("reduce-scatter", 1, False),
    "_reduce_scatter_base_": ("reduce-scatter", 1, False),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, False),
    "alltoall_": ("all-to-all", 1, False),
    "alltoall_base_": ("all-to-all", 1, False),
    "gather_": ("gather", 1, True),
    "scatter_": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv_": ("recv", 0, False),
    "recv_any_source_": ("recv", 0, False),
    "barrier": ("barrier", 0, False),
    "monitored_barrier_": ("barrier", 0, False),
}
FUNCTIONAL = {
    "all_reduce": ("all-reduce", 0, False),
    "all_reduce_": ("all-reduce", 0, False),
    "all_reduce_coalesced": ("all-reduce", 0, False),
    "all_reduce_coalesced_": ("all-reduce", 0, False),
    "broadcast": ("broadcast", 0, False),
    "broadcast_": ("broadcast", 0, False),
    "all_gather_into_tensor": ("all-gather", 0, True),
    "all_gather_into_tensor_out": ("all-gather", 0, True),
    "all_gather_into_tensor_coalesced": ("all-gather", 0, True),
    "reduce_scatter_tensor": ("reduce-scatter", 0, False),
    "reduce_scatter_tensor_out": ("reduce-scatter", 0, False),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0, False),
    "all_to_all_single": ("all-to-all", 0, False),
    "isend": ("send", 0, False),
    "irecv": ("recv", 0, False),
}
# Ranks of one machine may exchange tensors through shared memory, with the volume of a collective.
SHARED_MEMORY = {
    "average_through_memory_": ("all-reduce", 0, False),
    "gather_through_memory_": ("all-gather", 0, False),
}
TABLES = {"c10d": C10D, "_c10d_functional": FUNCTIONAL, "paceline": SHARED_MEMORY}
FSDP_RECORD = re.compile(r"FSDP::\w+( \((?P<module>.*)\))?$")


class CommCounter(TorchDispatchMode):
    """Counts what this rank sends inside a `with` block.

    Enter it around whole steps, and after the first step, in which engines settle. `model` is without
    wrappers.
    """

    def __init__(self, model: nn.Module, plan: ResolvedPlan):
        super().__init__()
        self.plan = plan
        self.model = model
        self.modules = ModuleTracker(model)
        self.calls: list[tuple[str, str, int, str, int, int]] = []
        self.groups: dict[str, tuple[str, int]] = {}  # name of a group -> axis, ranks
        self.records: list[str] = []  # of torch's record_function, innermost last

    def volume(self) -> CommVolume:
        return CommVolume(dist.get_rank() if dist.is_initialized() else 0, sum_entries(self.calls))

    def __enter__(self) -> "CommCounter":
        self.modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its collectives arrive here as separate calls
        namespace = func.namespace
        if namespace in TABLES:
            named_args = {
                argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
            } | (kwargs or {})
            group = named_args.get("process_group", named_args.get("group_name"))
            if group is not None:  # else the operator waits for another, or wraps it
                self._count(namespace, func._schema.name.partition("::")[2], args, group)
        elif namespace == "profiler":
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Any) -> None:
        if "enter" in str(func):
            self.records.append(args[0])
        elif self.records:
            self.records.pop()

    def _count(self, namespace: str, name: str, args: Any, group: Any) -> None:
        if name not in TABLES[namespace]:
            raise NotImplementedError(f"paceline comms does not know what {namespace}::{name} sends")
        collective, counted, is_part = TABLES[namespace][name]
        axis, ranks = self._find_group(group)
        tensors = [leaf for leaf in tree_leaves(args[counted]) if isinstance(leaf, Tensor)]
        size = (
            sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if collective != "barrier"
            else 0
        )
        is_between_stages = axis == "pp" and collective in ("send", "recv")
        module = MODEL if is_between_stages else self._find_module(tensors)
        self.calls.append((collective, axis, ranks, module, 1, size * ranks if is_part else size))

    def _find_group(self, given: Any) -> tuple[str, int]:
        """Return axis and number of ranks of a group.

        c10d passes a boxed group; functional collectives pass its name or the group.
        """
        group = given if isinstance(given, (str, dist.ProcessGroup)) else dist.ProcessGroup.unbox(given)
        name: Any = group if isinstance(group, str) else group.group_name
        if name not in self.groups:
            ranks = dist.get_process_group_ranks(_resolve_process_group(name))
            self.groups[name] = axis_of(self.plan, ranks), len(ranks)
        return self.groups[name]

    def _find_module(self, tensors: list[Tensor]) -> str:
        for record in reversed(self.records):
            if match := FSDP_RECORD.match(record):
                return name_of(match["module"] or "") or MODEL
        if names := self._find_parameters(tensors):
            return _find_common_module([name.rpartition(".")[0] for name in names]) or MODEL
        if self.modules.in_backward and not any(map(torch.is_floating_point, tensors)):
            return MODEL  # DDP sends which parameters were used
        running = self.modules.innermost()
        if running is None:  # between modules of a stage, the backward pass is still the model's
            return MODEL if self.modules.in_backward else PACELINE
        return running or MODEL

    def _find_parameters(self, tensors: list[Tensor]) -> list[str]:
        """Return the names of the parameters that share their memory with `tensors`.

        If there are none, return those whose gradients do: DDP keeps gradients in its buckets.
        """
        sent = set(map(_local_storage_id, tensors))
        named = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if is_materialized(parameter)
        ]
        weights = [name for name, parameter in named if _local_storage_id(parameter) in sent]
        return weights or [
            name
            for name, parameter in named
            if parameter.grad is not None and _local_storage_id(parameter.grad) in sent
        ]


def _local_storage_id(tensor: Any) -> int:
    return storage_id(tensor._local_tensor if is_dtensor(tensor) else tensor)


def _find_common_module(modules: list[str]) -> str:
    """Return the innermost module that contains all `modules`."""
    first, last = (module.split(".") if module else [] for module in (min(modules), max(modules)))
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return ".".join(name for name, _ in pairs)

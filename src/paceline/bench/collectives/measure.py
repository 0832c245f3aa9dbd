"""Measure collectives on a rank: a row for each operation, size and back end.

A row has times, bandwidths and the number of wrong elements.
"""

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.bench.collectives.backends import Backend, Call, Peers, join_backends
from paceline.bench.collectives.operations import (
    ALL_OPERATIONS,
    CollectiveOperation,
    GroupRank,
    bandwidths_GBps,
    build_tensor,
    count_wrong,
)
from paceline.bench.collectives.rank_groups import Axis, find_axes
from paceline.bench.collectives.request import DTYPES, CollectiveRequest
from paceline.bench.result import Row
from paceline.bench.timer import Budget, measure
from paceline.cluster.limits import free_memory_bytes
from paceline.distributed.world import World
from paceline.units import format_bytes

BARRIER_DELAY_S = 0.05  # delay of the last rank at the barrier that is checked


@dataclass(frozen=True)
class Rank:
    """A rank, its back ends and its peers."""

    world: World
    hosts: Sequence[str]  # of all ranks
    backends: Sequence[Backend]
    peers: Peers
    _groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = field(default_factory=dict)

    def group(self, backend: Backend, axis: Axis) -> Any:
        """Return this rank's group along an axis; all ranks create it at the first call."""
        key = backend.name, axis.groups
        if key not in self._groups:
            self._groups[key] = backend.group([[*ranks] for ranks in axis.groups])
        return self._groups[key]

    def group_rank(self, axis: Axis) -> GroupRank:
        ranks = next(ranks for ranks in axis.groups if self.world.rank in ranks)
        return GroupRank(ranks.index(self.world.rank), len(ranks))


@dataclass(frozen=True)
class CollectiveCase:
    """A row to measure."""

    operation: CollectiveOperation
    backend: Backend
    axis: Axis
    dtype: str
    in_place: bool
    size_bytes: int

    @property
    def call(self) -> Call | None:
        calls = self.backend.in_place if self.in_place else self.backend.out_of_place
        return calls.get(self.operation.name)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        """Return the elements of S, rounded up to whole blocks."""
        blocks = self.axis.ranks if self.operation.splits else 1
        return blocks * -(-self.size_bytes // (blocks * self.itemsize))

    def __str__(self) -> str:
        size = f" of {format_bytes(self.elements * self.itemsize)}" if self.elements else ""
        return f"{self.backend.name} {self.operation.name}{size}, {self.dtype}, on axis {self.axis.name}"


def measure_on_rank(request: CollectiveRequest, world: World, rendezvous_dir: Path) -> Iterator[Row | str]:
    """Yield rows as they are measured, and notes on what was left out and why. All ranks yield the same."""
    with join_backends(request.backends, world, request.timeout_s, rendezvous_dir, request.device) as (
        backends,
        peers,
    ):
        hosts = peers.all_gather(platform.node())
        yield from measure_rows(request, Rank(world, hosts, backends, peers))


def measure_rows(request: CollectiveRequest, rank: Rank) -> Iterator[Row | str]:
    """Yield the rows and notes of a request on a rank that has joined its peers."""
    axes, notes = find_axes(request.axes, request.plan, rank.hosts)
    yield from (f"{backend.name}: {backend.about}" for backend in rank.backends)
    yield from notes
    for name in request.operations:
        for backend in rank.backends:
            if name not in backend.in_place and name not in backend.out_of_place:
                yield f"{backend.name} {name} is left out: {backend.name} has no such operation"
    reported = set()
    for case in _build_cases(request, axes, rank.backends):
        row = _measure_case(case, rank, Budget(seconds=request.seconds, warmup_s=request.seconds / 4))
        if isinstance(row, str):
            if row in reported:
                continue
            reported.add(row)
        yield row


def _build_cases(
    request: CollectiveRequest, axes: Sequence[Axis], backends: Sequence[Backend]
) -> Iterator[CollectiveCase]:
    """Yield the rows to measure. Back ends and places alternate, so that they see the same conditions."""
    built = set()
    for name in request.operations:
        sized = name != "barrier"
        for axis in axes:
            for dtype in request.dtypes if sized else request.dtypes[:1]:
                for size_bytes in request.sizes_bytes if sized else (0,):
                    for backend in backends:
                        for place in request.places if sized else ("in",):
                            case = CollectiveCase(
                                ALL_OPERATIONS[name], backend, axis, dtype, place == "in", size_bytes
                            )
                            # two sizes may be rounded up to the same number of elements
                            key = (name, axis.name, dtype, backend.name, place, case.elements)
                            if case.call is not None and key not in built:
                                built.add(key)
                                yield case


def _measure_case(case: CollectiveCase, rank: Rank, budget: Budget) -> Row | str:
    """Return the row, or the reason why it is left out. All ranks return the same."""
    if reason := _lacks_memory(case, rank):
        return reason
    at = rank.group_rank(case.axis)
    group = rank.group(case.backend, case.axis)
    input, output = _buffers(case, at)
    run, num_wrong, why = None, 0, ""
    try:
        assert case.call is not None
        run = case.call(group, at, input, output)
        num_wrong = _check(case, rank, at, run, input, output)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:  # the back end does not support the type
        why = str(error).strip().splitlines()[0] or type(error).__name__
    if any(whys := rank.peers.all_gather(why)):
        reason = next(filter(None, whys))
        return f"{case.backend.name} {case.operation.name} of {case.dtype} is left out: {reason}"
    assert run is not None
    num_wrong = round(rank.peers.all_reduce_max([num_wrong])[0])
    input.zero_()
    output.zero_()
    _synchronize(case.backend.device)
    timing = measure(run, budget, case.backend.clock, rank.peers.all_reduce_max)
    row: dict[str, Any] = {
        "operation": case.operation.name,
        "backend": case.backend.name,
        "axis": case.axis.name,
        "spans": case.axis.spans,
        "ranks": case.axis.ranks,
        "groups": len(case.axis.groups),
        "dtype": case.dtype,
        "place": "in" if case.in_place else "out",
        "device": case.backend.device.type,
        "bytes": case.elements * case.itemsize,
        **timing.fields(),
        "wrong": num_wrong,
    }
    if case.elements:
        algbw, busbw = bandwidths_GBps(
            case.operation, case.axis.ranks, case.elements * case.itemsize, timing.median_s
        )
        row |= {"algbw_GBps": algbw, "busbw_GBps": busbw}
    return row


def _lacks_memory(case: CollectiveCase, rank: Rank) -> str | None:
    """Return why the case does not fit into memory, or None.

    It needs four tensors of S: input, output, expected output, and buffers of the back end.
    """
    needed = 4 * case.elements * case.itemsize
    if case.backend.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(case.backend.device)[0], "on the GPU"
    else:
        free, where = free_memory_bytes() // rank.world.local_size, "for each rank"
    lacking = rank.peers.all_reduce_max([needed - free])[0]
    if lacking <= 0:
        return None
    return (
        f"{case} is left out: it needs {format_bytes(needed)} on each rank, "
        f"{format_bytes(lacking)} more than is free {where}"
    )


def _buffers(case: CollectiveCase, at: GroupRank) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and output. In place, the smaller is a view of the larger, at the block of this rank."""
    dtype = dtype_of(case.dtype)
    inputs, outputs = case.operation.elements(at, case.elements)
    larger = torch.empty(max(inputs, outputs), dtype=dtype, device=case.backend.device)
    if not case.in_place or min(inputs, outputs) == 0:
        smaller = torch.empty(min(inputs, outputs), dtype=dtype, device=case.backend.device)
    elif inputs == outputs:
        smaller = larger
    else:
        smaller = larger[at.rank * min(inputs, outputs) :][: min(inputs, outputs)]
    return (larger, smaller) if inputs >= outputs else (smaller, larger)


def _check(
    case: CollectiveCase, rank: Rank, at: GroupRank, run: Any, input: torch.Tensor, output: torch.Tensor
) -> int:
    """Run the collective once on known values; return the number of wrong elements on this rank."""
    if case.operation.name == "barrier":
        return _check_barrier(case, rank, run)
    output.fill_(-1 if output.dtype.is_signed else 255)
    if given := case.operation.given(at, case.elements):
        input.copy_(build_tensor(given, at.size, input.dtype, input.device))
    _synchronize(case.backend.device)
    run()
    return count_wrong(output, case.operation.expected(at, case.elements), at.size)


def _synchronize(device: torch.device) -> None:
    """Wait for the work of this rank on a GPU: MPI does not know its streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_barrier(case: CollectiveCase, rank: Rank, run: Any) -> int:
    """Return 1 if the barrier releases this rank before the last rank arrives, else 0."""
    rank.peers.all_reduce_max([0.0])
    start = time.perf_counter()
    at = rank.group_rank(case.axis)
    if at.rank == at.size - 1:
        time.sleep(BARRIER_DELAY_S)
    run()
    _synchronize(case.backend.device)
    return int(time.perf_counter() - start < BARRIER_DELAY_S / 2)


def dtype_of(name: str) -> torch.dtype:
    names = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    return getattr(torch, names.get(name, name))

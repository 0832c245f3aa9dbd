"""Measures collectives on a rank: for each operation, size and back end a row with times, bandwidths and what came out wrong."""

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.bench.collectives.backends import Backend, Call, Peers, joined
from paceline.bench.collectives.operations import (
    OPERATIONS,
    CollectiveOperation,
    GroupRank,
    bandwidths_GBps,
    tensor,
    wrong,
)
from paceline.bench.collectives.rank_groups import Axis, axes
from paceline.bench.collectives.request import DTYPES, CollectiveRequest
from paceline.bench.result import Row
from paceline.bench.timer import Budget, measure
from paceline.distributed.world import World
from paceline.units import format_bytes

LATE_S = 0.05  # by which a rank comes late to the barrier that is checked


@dataclass(frozen=True)
class Rank:
    """A rank with whatever it measures on."""

    world: World
    hosts: Sequence[str]  # of all ranks
    backends: Sequence[Backend]
    peers: Peers
    _groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = field(default_factory=dict)

    def group(self, backend: Backend, axis: Axis) -> Any:
        key = backend.name, axis.groups
        if key not in self._groups:
            self._groups[key] = backend.group([[*ranks] for ranks in axis.groups])
        return self._groups[key]

    def place(self, axis: Axis) -> GroupRank:
        ranks = next(ranks for ranks in axis.groups if self.world.rank in ranks)
        return GroupRank(ranks.index(self.world.rank), len(ranks))


@dataclass(frozen=True)
class CollectiveCase:
    """One row that is to be measured."""

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
        """Of S, rounded up to whole blocks."""
        blocks = self.axis.ranks if self.operation.splits else 1
        return blocks * -(-self.size_bytes // (blocks * self.itemsize))

    def __str__(self) -> str:
        size = f" of {format_bytes(self.elements * self.itemsize)}" if self.elements else ""
        return f"{self.backend.name} {self.operation.name}{size}, {self.dtype}, on axis {self.axis.name}"


def on_rank(request: CollectiveRequest, world: World, meeting_place: Path) -> Iterator[Row | str]:
    """Rows as they are measured, the same on all ranks, and between them notes of what was left out, and why."""
    with joined(request.backends, world, request.timeout_s, meeting_place) as (backends, peers):
        hosts = peers.everyone(platform.node())
        yield from rows(request, Rank(world, hosts, backends, peers))


def rows(request: CollectiveRequest, rank: Rank) -> Iterator[Row | str]:
    found, notes = axes(request.axes, request.plan, rank.hosts)
    yield from (f"{backend.name}: {backend.about}" for backend in rank.backends)
    yield from notes
    said = set()
    for case in _cases(request, found, rank.backends):
        row = _row(case, rank, Budget(seconds=request.seconds, warmup_s=request.seconds / 4))
        if isinstance(row, str):
            if row in said:
                continue
            said.add(row)
        yield row


def _cases(
    request: CollectiveRequest, found: Sequence[Axis], backends: Sequence[Backend]
) -> Iterator[CollectiveCase]:
    """Back ends and places next to each other, so that they are measured under the same conditions."""
    for name in request.operations:
        sized = name != "barrier"
        for axis in found:
            for dtype in request.dtypes if sized else request.dtypes[:1]:
                for size_bytes in request.sizes_bytes if sized else (0,):
                    for backend in backends:
                        for place in request.places if sized else ("in",):
                            case = CollectiveCase(
                                OPERATIONS[name], backend, axis, dtype, place == "in", size_bytes
                            )
                            if case.call is not None:
                                yield case


def _row(case: CollectiveCase, rank: Rank, budget: Budget) -> Row | str:
    """The row, or why there is none; the same answer on all ranks."""
    if reason := _too_large(case, rank):
        return reason
    at = rank.place(case.axis)
    group = rank.group(case.backend, case.axis)
    input, output = _buffers(case, at)
    run, bad, why = None, 0, ""
    try:
        assert case.call is not None
        run = case.call(group, at, input, output)
        bad = _check(case, rank, at, run, input, output)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:  # a type that the back end does not know
        why = str(error).strip().splitlines()[0] or type(error).__name__
    if any(whys := rank.peers.everyone(why)):
        return f"{case.backend.name} {case.operation.name} of {case.dtype} is left out: {next(filter(None, whys))}"
    assert run is not None
    bad = round(rank.peers.largest([bad])[0])
    input.zero_()
    output.zero_()
    timing = measure(run, budget, case.backend.clock, rank.peers.largest)
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
        "wrong": bad,
    }
    if case.elements:
        algbw, busbw = bandwidths_GBps(
            case.operation, case.axis.ranks, case.elements * case.itemsize, timing.median_s
        )
        row |= {"algbw_GBps": algbw, "busbw_GBps": busbw}
    return row


def _too_large(case: CollectiveCase, rank: Rank) -> str | None:
    """Input, output, what must come out, and as much again within the back end."""
    needed = 4 * case.elements * case.itemsize
    if case.backend.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(case.backend.device)[0], "on the GPU"
    else:
        free, where = psutil.virtual_memory().available // rank.world.local_size, "for each rank"
    lacking = rank.peers.largest([needed - free])[0]
    if lacking <= 0:
        return None
    return f"{case} is left out: it takes {format_bytes(needed)} on each rank, {format_bytes(lacking)} more than is free {where}"


def _buffers(case: CollectiveCase, at: GroupRank) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output; in place the smaller one lies in the other, at the block of this rank."""
    dtype = dtype_of(case.dtype)
    given, got = case.operation.elements(at, case.elements)
    larger = torch.empty(max(given, got), dtype=dtype, device=case.backend.device)
    if not case.in_place or min(given, got) == 0:
        smaller = torch.empty(min(given, got), dtype=dtype, device=case.backend.device)
    elif given == got:
        smaller = larger
    else:
        smaller = larger[at.rank * min(given, got) :][: min(given, got)]
    return (larger, smaller) if given >= got else (smaller, larger)


def _check(
    case: CollectiveCase, rank: Rank, at: GroupRank, run: Any, input: torch.Tensor, output: torch.Tensor
) -> int:
    """Run it once on known values; elements that came out wrong on this rank."""
    if case.operation.name == "barrier":
        return _lets_through(case, rank, run)
    output.fill_(-1 if output.dtype.is_signed else 255)
    if given := case.operation.given(at, case.elements):
        input.copy_(tensor(given, at.size, input.dtype, input.device))
    run()
    return wrong(output, case.operation.expected(at, case.elements), at.size)


def _lets_through(case: CollectiveCase, rank: Rank, run: Any) -> int:
    """Whether a barrier lets this rank go on before the last one has come."""
    rank.peers.largest([0.0])
    began = time.perf_counter()
    at = rank.place(case.axis)
    if at.rank == at.size - 1:
        time.sleep(LATE_S)
    run()
    if case.backend.device.type == "cuda":
        torch.cuda.synchronize(case.backend.device)
    return int(time.perf_counter() - began < LATE_S / 2)


def dtype_of(name: str) -> torch.dtype:
    words = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    return getattr(torch, words.get(name, name))

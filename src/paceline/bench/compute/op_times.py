"""CPU times of single operations, from small to large, of which steps of small models consist."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.bench.compute.reference_steps import measure_reference_steps
from paceline.bench.result import Row
from paceline.bench.timer import WALL, Budget, measure
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory
from paceline.launch.rank_pool import Ranks
from paceline.plan.cost_model.op_times import BACKWARD, STEP, OpTimeTable

SIZES = (2**8, 2**13, 2**16, 2**19, 2**22)  # elements
BRANCHES = 32  # independent small operations per run, so that they share the start-up time of autograd
LARGE_BRANCHES = 2  # the same for large operations
LARGE = 2**16  # elements
MIN_REPETITIONS = 3
MAX_RANKS = 8
MIN_OPERATION_S = 5e-7
STEP_SHARE = 0.1  # of the budget, for whole steps
LINEAR = (
    (8, 16, 16),
    (64, 64, 64),
    (256, 128, 128),
    (2048, 128, 128),
    (2048, 256, 512),
    (4096, 512, 1024),
)  # rows, in, out
CONVOLUTION = (
    (1, 8, 8, 8),
    (8, 16, 16, 14),
    (16, 32, 32, 14),
    (16, 64, 64, 14),
    (16, 128, 128, 14),
)  # batch, channels in and out, side
ATTENTION = (
    (1, 2, 16, 16),
    (2, 4, 64, 32),
    (8, 4, 128, 32),
    (4, 8, 256, 64),
    (2, 8, 512, 64),
)  # batch, heads, positions, width


@dataclass(frozen=True)
class OperationCase:
    """One operation of one size, in several independent copies.

    size: elements read and written; of products, multiplications.
    """

    kind: str
    size: float
    modules: tuple[Callable[..., Tensor], ...]
    inputs: tuple[tuple[Tensor, ...], ...]
    weights: tuple[nn.Parameter, ...] = ()

    def forward(self) -> list[Tensor]:
        return [module(*args) for module, args in zip(self.modules, self.inputs, strict=True)]

    def build_empty_backward(self) -> Callable[[], object] | None:
        """Return a run of autograd.grad without any operation.

        It takes gradients of tensors with respect to themselves. Its time is the overhead of the arguments in
        a backward run. None if nothing requires a gradient.
        """
        leaves = [x for args in self.inputs for x in args if x.requires_grad] or list(self.weights)
        ones = [torch.ones_like(x) for x in leaves]
        return partial(torch.autograd.grad, leaves, leaves, ones) if leaves else None

    def build_runs(self) -> dict[str, Callable[[], object]]:
        """Return the forward run and, if there are gradients, the backward run, by kind."""
        leaves = [x for args in self.inputs for x in args if x.requires_grad] + list(self.weights)
        if not leaves:
            return {self.kind: self.forward}
        outputs = self.forward()
        gradients = [torch.randn_like(output) for output in outputs]
        backward = partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True)
        return {self.kind: self.forward, self.kind + BACKWARD: backward}


def _build_case(
    kind: str,
    size: float,
    make: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]],
    branches: int,
) -> OperationCase:
    copies = [make() for _ in range(branches)]
    weights = tuple(p for module, _ in copies if isinstance(module, nn.Module) for p in module.parameters())
    return OperationCase(
        kind, size, tuple(module for module, _ in copies), tuple(args for _, args in copies), weights
    )


def _pointwise(
    elements: int,
) -> dict[str, tuple[float, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]]]:
    """Return by kind: elements read and written per input element, and a factory of the operation."""
    width = min(64, elements)
    side = int(math.sqrt(elements / 16))

    def x(*shape: int) -> Tensor:
        return torch.randn(shape or (elements // width, width), requires_grad=True)

    return {
        "move": (2.0, lambda: (torch.relu, (x(),))),
        "function": (2.0, lambda: (F.gelu, (x(),))),
        "norm": (2.0, lambda: (nn.LayerNorm(width), (x(),))),
        "pool": (1.25, lambda: (nn.MaxPool2d(2), (x(1, 16, side, side),))),
        "draw": (1.0, lambda: (lambda t: t.bernoulli_(0.5), (torch.empty(elements),))),
        "view": (1.0, lambda: (lambda t: t.transpose(0, 1), (x(),))),
        "gather": (2.0, lambda: (nn.Embedding(256, width), (torch.randint(256, (elements // width,)),))),
    }


def build_cases() -> Iterator[OperationCase]:
    """Yield the operations of all kinds and sizes."""
    for elements in SIZES:
        branches = BRANCHES if elements < LARGE else LARGE_BRANCHES
        for kind, (moved, make) in _pointwise(elements).items():
            yield _build_case(kind, moved * elements, make, branches)
    for rows, inputs, outputs in LINEAR:
        volume = rows * inputs * outputs
        yield _build_case(
            "linear",
            volume,
            lambda rows=rows, inputs=inputs, outputs=outputs: (
                nn.Linear(inputs, outputs),
                (torch.randn(rows, inputs, requires_grad=True),),
            ),  # type: ignore[misc]
            BRANCHES if volume < 2**20 else LARGE_BRANCHES,
        )
    for batch, inputs, outputs, side in CONVOLUTION:
        volume = batch * inputs * outputs * 9 * side**2
        yield _build_case(
            "convolution",
            volume,
            lambda batch=batch, inputs=inputs, outputs=outputs, side=side: (  # type: ignore[misc]
                nn.Conv2d(inputs, outputs, 3, padding=1),
                (torch.randn(batch, inputs, side, side, requires_grad=True),),
            ),
            LARGE_BRANCHES,
        )
    for shape in ATTENTION:
        volume = 2 * math.prod(shape) * shape[2]
        yield _build_case("attention", volume, partial(_make_attention, shape), LARGE_BRANCHES)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _make_attention(shape: tuple[int, int, int, int]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return _attend, tuple(torch.randn(shape, requires_grad=True) for _ in range(3))


def _build_updates() -> Iterator[tuple[float, Callable[[], object]]]:
    """Yield (elements of a weight, AdamW update with the norm of the gradients)."""
    for elements in SIZES:
        count = BRANCHES if elements < LARGE else LARGE_BRANCHES
        weights = [nn.Parameter(torch.randn(elements)) for _ in range(count)]
        gradients = [torch.randn(elements) for _ in range(count)]
        optimizer = torch.optim.AdamW(weights, fused=True)

        def update(weights: Any = weights, gradients: Any = gradients, optimizer: Any = optimizer) -> None:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            torch._foreach_norm(gradients)
            optimizer.step()

        yield elements, update


def measure_in_process(threads: int, budget_s: float) -> list[Row]:
    """Return a row per kind and size with the seconds of one operation, measured with `threads` threads."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    each_s = (
        budget_s * (1 - STEP_SHARE) / (2 * (len(SIZES) * 8 + len(LINEAR) + len(CONVOLUTION) + len(ATTENTION)))
    )
    rows: list[Row] = []

    def time(kind: str, size: float, count: int, run: Callable[[], object]) -> None:
        timing = measure(run, Budget(each_s * 0.7, each_s * 0.2, min_count=MIN_REPETITIONS), WALL)
        figures: dict[str, Any] = {
            name: value / count if name.endswith("_s") else value for name, value in timing.fields().items()
        }
        row: dict[str, Any] = {"operation": kind, "threads": threads, "size": float(size)}
        rows.append(row | figures)

    try:
        for case in build_cases():
            for kind, run in case.build_runs().items():
                time(kind, case.size, len(case.modules), run)
            if (empty_backward := case.build_empty_backward()) is not None:
                budget = Budget(each_s * 0.2, each_s * 0.1, min_count=MIN_REPETITIONS)
                overhead_s = measure(empty_backward, budget, WALL).min_s / len(case.modules)
                _subtract(rows[-1], overhead_s)
        for elements, update in _build_updates():
            time("update", elements, BRANCHES if elements < LARGE else LARGE_BRANCHES, update)
        rows += _measure_steps(rows, threads, budget_s * STEP_SHARE)
    finally:
        torch.set_num_threads(before)
    return rows


def _measure_steps(rows: Sequence[Row], threads: int, budget_s: float) -> list[Row]:
    """Return a row for each reference step, whose size is the sum of its operations in `rows`."""
    tables: dict[str, dict[float, float]] = {}
    for row in rows:
        tables.setdefault(str(row["operation"]), {})[float(row["size"] or 0)] = float(row["min_s"] or 0)
    op_times = OpTimeTable({kind: tuple(sorted(table.items())) for kind, table in tables.items()})
    steps: list[Row] = []
    for alone_s, timing in measure_reference_steps(op_times, budget_s):
        step: dict[str, Any] = {"operation": STEP, "threads": threads, "size": alone_s}
        steps.append(step | timing.fields())
    return steps


def _subtract(row: Row, seconds: float) -> None:
    for name in ("median_s", "min_s", "p95_s"):
        row[name] = max(MIN_OPERATION_S, float(row[name] or 0) - seconds)  # type: ignore[index]


def measure_op_times(budget_s: float) -> Iterator[Row]:
    """Yield the rows of one process with all threads, then of one process per core with one thread each.

    The processes share caches and memory bandwidth, as the ranks of a training do.
    """
    cores = usable_cores()
    yield from measure_in_process(cores, budget_s / 2)
    if cores > 1:
        with Ranks(min(cores, MAX_RANKS)) as ranks:
            yield from ranks(_measure_on_rank, budget_s / 2, timeout_s=60 + 4 * budget_s)[0]


def _measure_on_rank(budget_s: float) -> list[Row]:
    dist.barrier()
    return measure_in_process(1, budget_s)

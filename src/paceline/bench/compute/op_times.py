"""How long a CPU takes for one operation of each kind, from small to large: what steps of small models are made of."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.bench.result import Row
from paceline.bench.timer import WALL, Budget, measure
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory
from paceline.launch.rank_pool import Ranks
from paceline.plan.cost_model.op_times import BACKWARD

SIZES = (2**8, 2**13, 2**16, 2**19, 2**22)  # elements
BRANCHES = 32  # operations side by side, so that what the engine of autograd takes to start is shared; two where they are large
LARGE = 2**16
LEAST = 3
MOST_RANKS = 8
LEAST_S = 5e-7  # of one operation
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
    """One operation of one size, some times side by side. `size`: elements read and written, or multiplications of products."""

    kind: str
    size: float
    modules: tuple[Callable[..., Tensor], ...]
    inputs: tuple[tuple[Tensor, ...], ...]
    weights: tuple[nn.Parameter, ...] = ()

    def forward(self) -> list[Tensor]:
        return [module(*given) for module, given in zip(self.modules, self.inputs, strict=True)]

    def nothing(self) -> Callable[[], object] | None:
        """Of the backward run what autograd.grad takes for its arguments alone: gradients of tensors by themselves."""
        leaves = [x for given in self.inputs for x in given if x.requires_grad] or list(self.weights)
        ones = [torch.ones_like(x) for x in leaves]
        return partial(torch.autograd.grad, leaves, leaves, ones) if leaves else None

    def runs(self) -> dict[str, Callable[[], object]]:
        leaves = [x for given in self.inputs for x in given if x.requires_grad] + list(self.weights)
        if not leaves:
            return {self.kind: self.forward}
        outputs = self.forward()
        gradients = [torch.randn_like(output) for output in outputs]
        back = partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True)
        return {self.kind: self.forward, self.kind + BACKWARD: back}


def _case(
    kind: str,
    size: float,
    make: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]],
    branches: int,
) -> OperationCase:
    made = [make() for _ in range(branches)]
    weights = tuple(p for module, _ in made if isinstance(module, nn.Module) for p in module.parameters())
    return OperationCase(
        kind, size, tuple(module for module, _ in made), tuple(given for _, given in made), weights
    )


def _pointwise(
    elements: int,
) -> dict[str, tuple[float, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]]]:
    """By kind: elements read and written for each of the input, and what makes one."""
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


def cases() -> Iterator[OperationCase]:
    for elements in SIZES:
        branches = BRANCHES if elements < LARGE else 2
        for kind, (moved, make) in _pointwise(elements).items():
            yield _case(kind, moved * elements, make, branches)
    for rows, given, got in LINEAR:
        volume = rows * given * got
        yield _case(
            "linear",
            volume,
            lambda rows=rows, given=given, got=got: (
                nn.Linear(given, got),
                (torch.randn(rows, given, requires_grad=True),),
            ),  # type: ignore[misc]
            BRANCHES if volume < 2**20 else 2,
        )
    for batch, given, got, side in CONVOLUTION:
        volume = batch * given * got * 9 * side**2
        yield _case(
            "convolution",
            volume,
            lambda batch=batch, given=given, got=got, side=side: (  # type: ignore[misc]
                nn.Conv2d(given, got, 3, padding=1),
                (torch.randn(batch, given, side, side, requires_grad=True),),
            ),
            2,
        )
    for shape in ATTENTION:
        yield _case("attention", 2 * math.prod(shape) * shape[2], partial(_attention, shape), 2)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attention(shape: tuple[int, int, int, int]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return _attend, tuple(torch.randn(shape, requires_grad=True) for _ in range(3))


def _updates() -> Iterator[tuple[float, Callable[[], object]]]:
    """AdamW and the norm of the gradients, by elements of a weight; each for one of the weights."""
    for elements in SIZES:
        count = BRANCHES if elements < LARGE else 2
        weights = [nn.Parameter(torch.randn(elements)) for _ in range(count)]
        gradients = [torch.randn(elements) for _ in range(count)]
        optimizer = torch.optim.AdamW(weights, fused=True)

        def update(weights: Any = weights, gradients: Any = gradients, optimizer: Any = optimizer) -> None:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            torch._foreach_norm(gradients)
            optimizer.step()

        yield elements, update


def measured(threads: int, budget_s: float) -> list[Row]:
    """On this process with so many threads; a row for each kind and size, the seconds being those of one operation."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    each_s = budget_s / (2 * (len(SIZES) * 8 + len(LINEAR) + len(CONVOLUTION) + len(ATTENTION)))
    rows: list[Row] = []

    def time(kind: str, size: float, count: int, run: Callable[[], object]) -> None:
        found = measure(run, Budget(each_s * 0.7, each_s * 0.2, least=LEAST), WALL)
        figures: dict[str, Any] = {
            name: value / count if name.endswith("_s") else value for name, value in found.fields().items()
        }
        row: dict[str, Any] = {"operation": kind, "threads": threads, "size": float(size)}
        rows.append(row | figures)

    try:
        for case in cases():
            for kind, run in case.runs().items():
                time(kind, case.size, len(case.modules), run)
            if (nothing := case.nothing()) is not None:
                spent = measure(nothing, Budget(each_s * 0.2, each_s * 0.1, least=LEAST), WALL).min_s / len(
                    case.modules
                )
                _take_off(rows[-1], spent)
        for elements, update in _updates():
            time("update", elements, BRANCHES if elements < LARGE else 2, update)
    finally:
        torch.set_num_threads(before)
    return rows


def _take_off(row: Row, seconds: float) -> None:
    for name in ("median_s", "min_s", "p95_s"):
        row[name] = max(LEAST_S, float(row[name] or 0) - seconds)  # type: ignore[index]


def paces(budget_s: float) -> Iterator[Row]:
    """With all threads in one process, and with one thread in as many processes as there are cores, which share what they share."""
    cores = usable_cores()
    yield from measured(cores, budget_s / 2)
    if cores > 1:
        with Ranks(min(cores, MOST_RANKS)) as ranks:
            yield from ranks(_alone, budget_s / 2, timeout_s=60 + 4 * budget_s)[0]


def _alone(budget_s: float) -> list[Row]:
    dist.barrier()
    return measured(1, budget_s)

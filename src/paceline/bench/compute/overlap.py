"""Overlap with computation: copies to and from a GPU on one stream and on two, and a collective."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.compute.kernels import MIN_REPETITIONS, first_line
from paceline.bench.compute.matmul import Run
from paceline.bench.result import Row
from paceline.bench.timer import WALL, Budget, Clock, Timing, measure, own_values, synchronized_clock
from paceline.distributed.process_group import choose_device, threads_per_rank
from paceline.distributed.world import World
from paceline.launch.rank_pool import Ranks

KEYS = ("operation", "memory", "streams", "bytes", "backend", "ranks")
ROUNDS = 3
COPIED_BYTES = 2**28
SENT_BYTES = (2**20, 2**24, 2**26)
WIDTHS = {"cpu": 512, "cuda": 4096}  # of the square product that overlaps


def hidden_share(alone_s: float, compute_s: float, both_s: float) -> float:
    """Return the share of the shorter of two operations that is hidden behind the other.

    1: completely hidden. 0: not hidden. Below 0: the operations slow each other down.
    """
    return (alone_s + compute_s - both_s) / min(alone_s, compute_s)


def make_product(device: torch.device) -> Run:
    """Return a function that runs a square matrix product."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = WIDTHS[device.type]
    a, b, out = (torch.randn(width, width, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def wall_clock(device: torch.device) -> Clock:
    """Return a wall clock that includes the time for which the host waits."""
    return synchronized_clock(torch.cuda.synchronize) if device.type == "cuda" else WALL


def measure_copies(device: torch.device, budget_s: float) -> Iterator[Row | str]:
    """Measure copies between the host and a GPU, overlapped with matrix products that take about as long."""
    if device.type != "cuda":
        yield "no CUDA device: the overlap of copies and streams is not measured"
        return
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    side_stream = torch.cuda.Stream(device)
    multiply = make_product(device)
    for memory in ("pinned", "pageable"):
        try:
            host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=memory == "pinned")
        except RuntimeError as error:
            yield f"copies of {memory} memory: {first_line(error)}"
            continue
        host.fill_(1)  # so that its pages are allocated
        directions: dict[str, Run] = {
            "copy to device": lambda host=host: on_device.copy_(host, non_blocking=True),  # type: ignore[misc]
            "copy to host": lambda host=host: host.copy_(on_device, non_blocking=True),  # type: ignore[misc]
        }
        for name, copy in directions.items():
            row: dict[str, Any] = {"operation": name, "memory": memory, "bytes": COPIED_BYTES}

            def on_two_streams(work: Run, copy: Run = copy) -> None:
                work()  # first: a copy of pageable memory blocks the host until it has finished
                with torch.cuda.stream(side_stream):
                    copy()

            def on_one_stream(work: Run, copy: Run = copy) -> None:
                work()
                copy()

            overlaps = _measure_overlap(
                copy,
                multiply,
                {1: on_one_stream, 2: on_two_streams},
                budget_s / 4,
                wall_clock(device),
                own_values,
            )
            yield from (
                row | figures | {"streams": streams, "Bps": COPIED_BYTES / figures["alone_s"]}
                for streams, figures in overlaps
            )


def measure_collectives(device: torch.device, ranks: int, budget_s: float) -> Iterator[Row | str]:
    """Start ranks, and measure an all-reduce overlapped with matrix products on each rank."""
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        yield (
            "the overlap of a collective is not measured: "
            f"it requires {ranks} CUDA devices, got {torch.cuda.device_count()}"
        )
        return
    with Ranks(ranks) as started:
        yield from started(measure_on_rank, device.type, budget_s, timeout_s=60 + 4 * budget_s)[0]


def measure_on_rank(device_type: str, budget_s: float) -> list[Row]:
    """Return the rows of an all-reduce overlapped with products, on a rank of a gloo process group."""
    size = dist.get_world_size()
    torch.set_num_threads(threads_per_rank(size, None))
    device = choose_device(World(dist.get_rank(), size, dist.get_rank(), size), device_type)
    group = dist.new_group(backend="nccl") if device_type == "cuda" else None
    multiply = make_product(device)
    rows: list[Row] = []
    for sent in SENT_BYTES:
        tensor = torch.zeros(sent // 4, device=device)

        def send(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=group)

        def both(work: Run, tensor: torch.Tensor = tensor) -> None:
            sending = dist.all_reduce(tensor, group=group, async_op=True)
            work()
            sending.wait()

        [(_, figures)] = _measure_overlap(
            send, multiply, {0: both}, budget_s / len(SENT_BYTES), wall_clock(device), _all_reduce_max
        )
        row: dict[str, Any] = {
            "operation": "all-reduce",
            "bytes": sent,
            "backend": "nccl" if group else "gloo",
            "ranks": size,
        }
        rows.append(row | figures | {"Bps": sent / figures["alone_s"]})
    return rows


def _all_reduce_max(values: Sequence[float]) -> list[float]:
    """Return the element-wise maximum over the ranks."""
    maxima = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return [float(value) for value in maxima]


def _measure_overlap(
    send: Run,
    multiply: Run,
    combinations: dict[int, Callable[[Run], None]],
    budget_s: float,
    clock: Clock,
    all_reduce_max: Callable[[Sequence[float]], list[float]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Time `send`, a computation of about the same length, and each combination of both.

    The runs alternate for ROUNDS rounds, and the median round counts, so that other load affects all of them
    equally.
    """
    budget = Budget(
        budget_s / (2 + len(combinations)) / ROUNDS * 0.8,
        budget_s / (2 + len(combinations)) / ROUNDS * 0.1,
        min_count=MIN_REPETITIONS,
    )

    def time_run(run: Run) -> Timing:
        return measure(run, budget, clock, all_reduce_max)

    count = max(1, round(time_run(send).median_s / time_run(multiply).median_s))

    def work() -> None:
        for _ in range(count):
            multiply()

    runs: list[Run] = [send, work, *(partial(both, work) for both in combinations.values())]
    rounds = [[time_run(run) for run in runs] for _ in range(ROUNDS)]
    sent, computed, *combined = (
        sorted(timings, key=lambda timing: timing.median_s)[ROUNDS // 2]
        for timings in zip(*rounds, strict=True)
    )
    for key, both in zip(combinations, combined, strict=True):
        figures: dict[str, Any] = {
            "alone_s": sent.median_s,
            "compute_s": computed.median_s,
            "hidden": hidden_share(sent.median_s, computed.median_s, both.median_s),
        }
        yield key, figures | both.fields()

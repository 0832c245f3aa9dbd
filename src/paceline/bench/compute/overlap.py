"""What goes on under computing: copies to and from a GPU on one stream and on two, and a collective beside matrix products."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.compute.kernels import LEAST, first_line
from paceline.bench.compute.matmul import Run
from paceline.bench.result import Row
from paceline.bench.timer import WALL, Budget, Clock, Timing, alone, measure, synchronized
from paceline.distributed.process_group import choose_device, threads_per_rank
from paceline.distributed.world import World
from paceline.launch.rank_pool import Ranks

KEYS = ("operation", "memory", "streams", "bytes", "backend", "ranks")
TURNS = 3
COPIED_BYTES = 2**28
SENT_BYTES = (2**20, 2**24, 2**26)
WIDTHS = {"cpu": 512, "cuda": 4096}  # of the square product that runs meanwhile


def hidden(alone_s: float, compute_s: float, both_s: float) -> float:
    """Share of the shorter of two pieces of work that took no time of its own: 1 is all of it, 0 is nothing; below 0 they were in each
    other's way."""
    return (alone_s + compute_s - both_s) / min(alone_s, compute_s)


def product(device: torch.device) -> Run:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = WIDTHS[device.type]
    a, b, out = (torch.randn(width, width, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def wall(device: torch.device) -> Clock:
    """With what the host waits for in it."""
    return synchronized(torch.cuda.synchronize) if device.type == "cuda" else WALL


def copies(device: torch.device, budget_s: float) -> Iterator[Row | str]:
    """Copies between the host and a GPU, under a matrix product that takes about as long."""
    if device.type != "cuda":
        yield "no CUDA device here: copies to it, and streams, cannot be shown"
        return
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)
    multiply = product(device)
    for memory in ("pinned", "pageable"):
        try:
            host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=memory == "pinned")
        except RuntimeError as error:
            yield f"copies of {memory} memory: {first_line(error)}"
            continue
        host.fill_(1)  # so that its pages are there
        directions: dict[str, Run] = {
            "copy to device": lambda host=host: there.copy_(host, non_blocking=True),  # type: ignore[misc]
            "copy to host": lambda host=host: host.copy_(there, non_blocking=True),  # type: ignore[misc]
        }
        for name, copy in directions.items():
            row: dict[str, Any] = {"operation": name, "memory": memory, "bytes": COPIED_BYTES}

            def on_two_streams(work: Run, copy: Run = copy) -> None:
                work()  # first, since a copy of pageable memory keeps the host until it is done
                with torch.cuda.stream(side):
                    copy()

            def on_one_stream(work: Run, copy: Run = copy) -> None:
                work()
                copy()

            found = _beside(
                copy, multiply, {1: on_one_stream, 2: on_two_streams}, budget_s / 4, wall(device), alone
            )
            yield from (
                row | figures | {"streams": streams, "Bps": COPIED_BYTES / figures["alone_s"]}
                for streams, figures in found
            )


def collectives(device: torch.device, ranks: int, budget_s: float) -> Iterator[Row | str]:
    """An all-reduce among ranks that are started here, under matrix products of each."""
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        yield f"{torch.cuda.device_count()} CUDA device here, and {ranks} are needed to show a collective under computing"
        return
    with Ranks(ranks) as started:
        yield from started(on_rank, device.type, budget_s, timeout_s=60 + 4 * budget_s)[0]


def on_rank(kind: str, budget_s: float) -> list[Row]:
    """On each rank, in a process group over gloo."""
    size = dist.get_world_size()
    torch.set_num_threads(threads_per_rank(size, None))
    device = choose_device(World(dist.get_rank(), size, dist.get_rank(), size), kind)
    group = dist.new_group(backend="nccl") if kind == "cuda" else None
    multiply = product(device)
    rows: list[Row] = []
    for sent in SENT_BYTES:
        tensor = torch.zeros(sent // 4, device=device)

        def send(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=group)

        def both(work: Run, tensor: torch.Tensor = tensor) -> None:
            sending = dist.all_reduce(tensor, group=group, async_op=True)
            work()
            sending.wait()

        [(_, figures)] = _beside(
            send, multiply, {0: both}, budget_s / len(SENT_BYTES), wall(device), _largest
        )
        row: dict[str, Any] = {
            "operation": "all-reduce",
            "bytes": sent,
            "backend": "nccl" if group else "gloo",
            "ranks": size,
        }
        rows.append(row | figures | {"Bps": sent / figures["alone_s"]})
    return rows


def _largest(values: Sequence[float]) -> list[float]:
    """Of each value the largest over the ranks."""
    everywhere = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return [float(value) for value in everywhere]


def _beside(
    send: Run,
    multiply: Run,
    together: dict[int, Callable[[Run], None]],
    budget_s: float,
    clock: Clock,
    largest: Callable[[Sequence[float]], list[float]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Times of `send` alone, of about as much computing alone, and of both in each way there is: in turns, and of the turns the median, so
    that what else goes on in a machine is in all of them."""
    budget = Budget(
        budget_s / (2 + len(together)) / TURNS * 0.8,
        budget_s / (2 + len(together)) / TURNS * 0.1,
        least=LEAST,
    )

    def timed(run: Run) -> Timing:
        return measure(run, budget, clock, largest)

    times = max(1, round(timed(send).median_s / timed(multiply).median_s))

    def work() -> None:
        for _ in range(times):
            multiply()

    runs: list[Run] = [send, work, *(partial(both, work) for both in together.values())]
    turns = [[timed(run) for run in runs] for _ in range(TURNS)]
    sent, computed, *both = (
        sorted(of_run, key=lambda found: found.median_s)[TURNS // 2] for of_run in zip(*turns, strict=True)
    )
    for key, found in zip(together, both, strict=True):
        figures: dict[str, Any] = {"alone_s": sent.median_s, "compute_s": computed.median_s}
        yield (
            key,
            figures | {"hidden": hidden(sent.median_s, computed.median_s, found.median_s)} | found.fields(),
        )

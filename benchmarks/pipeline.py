"""Two stages on two ranks: steps/s beside the same by hand on torch's PipelineStage, and the bubble of each schedule beside its formula.

    python benchmarks/pipeline.py [--rounds 12]

Both contenders live in the same two processes and take turns, a block of steps each; what counts is the ratio of two neighbouring
blocks. The bubble is the part of a step in which a rank computes nothing, of both ranks together.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from paceline import Spec
from paceline.launch.world import world
from paceline.plan.plan import parse
from paceline.tasks.text import Text
from paceline.training.prepare import lay_out

RANKS, MICRO, SHARE, BLOCK = 2, 8, 4, 4
TASK = Text(width=128, depth=4, context=64)
CPU = torch.device("cpu")


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (MICRO, SHARE, TASK.context + 1), generator=draw)
    return [(piece[:, :-1], piece[:, 1:]) for piece in tokens]


def ours(schedule: str) -> tuple[Callable[[], Any], Any]:
    plan = parse(f"pp={RANKS},micro={MICRO},schedule={schedule}").on(RANKS)
    laid = lay_out(Spec(batch=MICRO * SHARE), plan, world(), TASK, CPU)
    pieces = batches()
    return lambda: laid.step(pieces, 0, 1.0), laid.step.pipeline.schedule


class First(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.token, self.position, self.blocks = model.token, model.position, nn.ModuleList(model.blocks[: TASK.depth // 2])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return x


class Second(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList(model.blocks[TASK.depth // 2 :]), model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_hand() -> Callable[[], Any]:
    rank = dist.get_rank()
    module = (First, Second)[rank](TASK.model())
    stage = pipelining.PipelineStage(module, rank, RANKS, CPU)
    schedule = pipelining.Schedule1F1B(stage, MICRO, loss_fn=lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten()))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))

    def step() -> None:
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=[], return_outputs=False)
        torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(BLOCK):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / BLOCK


@contextmanager
def computing(schedule: Any) -> Iterator[list[float]]:
    """The seconds in which this rank computes."""
    spent: list[float] = []
    stages = getattr(schedule, "_stages", None) or [schedule._stage]

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        return call

    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    for stage in stages:
        for name in names:
            setattr(stage, name, timed(getattr(stage, name)))
    try:
        yield spent
    finally:
        for stage in stages:
            for name in names:
                delattr(stage, name)


def formula(schedule: str) -> float:
    """Part of the time of a step; forward, backward by input and backward by weight taken as equally long, communication as nothing."""
    p, m, v = RANKS, MICRO, 2
    ideal = {"gpipe": (p - 1) / m, "1f1b": (p - 1) / m, "interleaved": (p - 1) / (v * m), "zero-bubble": (p - 1) / (3 * v * m), "zbv": 0.0}
    return ideal[schedule] / (1 + ideal[schedule])


def bubble(schedule: str) -> float:
    step, engine = ours(schedule)
    seconds(step)
    found = []
    for _ in range(3):
        with computing(engine) as spent:
            whole = seconds(step) * BLOCK
        busy = torch.tensor(sum(spent))
        dist.all_reduce(busy)
        found.append(1 - busy.item() / (RANKS * whole))
    return statistics.median(found)


def be_a_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hand, (step, _) = by_hand(), ours("1f1b")
    for one in (hand, step):
        seconds(one)
    ratios = []
    for at in range(rounds):
        first, second = (seconds(one) for one in ((hand, step) if at % 2 else (step, hand)))
        ratios.append(first / second if at % 2 else second / first)
    if dist.get_rank() == 0:
        least, middle, most = min(ratios), statistics.median(ratios), max(ratios)
        print(f"steps/s of those by hand (1f1b, {MICRO} micro-batches): {middle:.3f}, {least:.3f} to {most:.3f}", flush=True)
        print("schedule       bubble   formula")
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        found = bubble(schedule)
        if dist.get_rank() == 0:
            print(f"{schedule:12} {found:8.1%} {formula(schedule):9.1%}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    if "RANK" in os.environ:
        be_a_rank(rounds)
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        __file__,
        "--rounds",
        str(rounds),
    ]
    sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()

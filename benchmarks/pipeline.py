"""Two stages on two ranks: steps/s beside the same by hand on torch's PipelineStage, and the bubble of each schedule beside its formula.

    python benchmarks/pipeline.py [--rounds 12]

The bubble is the part of a step in which a rank computes nothing, of both ranks together.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import turns
from paceline import Spec
from paceline.distributed.world import read_world
from paceline.plan.plan import parse
from paceline.tasks.text import Text
from paceline.training.setup import build_training

RANKS, MICRO, SHARE = 2, 8, 4
TASK = Text(width=128, depth=4, context=64)
CPU = torch.device("cpu")


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (MICRO, SHARE, TASK.context + 1), generator=draw)
    return [(piece[:, :-1], piece[:, 1:]) for piece in tokens]


def ours(schedule: str) -> tuple[Callable[[], Any], Any]:
    plan = parse(f"pp={RANKS},microbatches={MICRO},pp_schedule={schedule}").resolve(RANKS)
    laid = build_training(Spec(batch=MICRO * SHARE), plan, read_world(), TASK, CPU)
    pieces = batches()
    return lambda: laid.step(pieces, 0, 1.0), laid.step.pipeline.schedule


class First(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.token, self.position, self.blocks = (
            model.token,
            model.position,
            nn.ModuleList(model.blocks[: TASK.depth // 2]),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return x


class Second(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.blocks, self.norm, self.head = (
            nn.ModuleList(model.blocks[TASK.depth // 2 :]),
            model.norm,
            model.head,
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_hand() -> Callable[[], Any]:
    rank = dist.get_rank()
    module = (First, Second)[rank](TASK.model())
    stage = pipelining.PipelineStage(module, rank, RANKS, CPU)
    schedule = pipelining.Schedule1F1B(
        stage, MICRO, loss_fn=lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())
    )
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
    ideal = {
        "gpipe": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "interleaved": (p - 1) / (v * m),
        "zero-bubble": (p - 1) / (3 * v * m),
        "zbv": 0.0,
    }
    return ideal[schedule] / (1 + ideal[schedule])


def bubble(schedule: str) -> float:
    step, engine = ours(schedule)
    turns.seconds(step)
    found = []
    for _ in range(3):
        with computing(engine) as spent:
            whole = turns.seconds(step) * turns.BLOCK
        busy = torch.tensor(sum(spent))
        dist.all_reduce(busy)
        found.append(1 - busy.item() / (RANKS * whole))
    return statistics.median(found)


def be_a_rank(rounds: int) -> None:
    turns.compare(f"pp={RANKS}, 1f1b, microbatches={MICRO}", ours("1f1b")[0], by_hand(), rounds)
    turns.say("schedule       bubble   formula")
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        turns.say(f"{schedule:12} {bubble(schedule):8.1%} {formula(schedule):9.1%}")


if __name__ == "__main__":
    turns.main(__doc__, be_a_rank, (RANKS,))

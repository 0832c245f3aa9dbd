"""Two pipeline stages on two ranks: steps/s relative to torch's PipelineStage, and bubbles.

    python benchmarks/pipeline.py [--rounds 12]

The bubble is the share of a step in which a rank computes nothing, over both ranks together.
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

RANKS, MICROBATCHES, SAMPLES = 2, 8, 4  # samples per micro-batch
TASK = Text(width=128, depth=4, context=64)
CPU = torch.device("cpu")


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (MICROBATCHES, SAMPLES, TASK.context + 1), generator=generator)
    return [(sequence[:, :-1], sequence[:, 1:]) for sequence in tokens]


def build_paceline(schedule: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that makes one step, and the schedule."""
    plan = parse(f"pp={RANKS},microbatches={MICROBATCHES},pp_schedule={schedule}").resolve(RANKS)
    prepared = build_training(Spec(batch=MICROBATCHES * SAMPLES), plan, read_world(), TASK, CPU)
    micro_batches = make_batches()
    return lambda: prepared.step(micro_batches, 0, 1.0), prepared.step.pipeline.schedule


class FirstStage(nn.Module):
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


class SecondStage(nn.Module):
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


def build_handwritten() -> Callable[[], Any]:
    rank = dist.get_rank()
    module = (FirstStage, SecondStage)[rank](TASK.model())
    stage = pipelining.PipelineStage(module, rank, RANKS, CPU)
    schedule = pipelining.Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())
    )
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    x, y = (torch.cat(part) for part in zip(*make_batches(), strict=True))

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
def record_compute_times(schedule: Any) -> Iterator[list[float]]:
    """Yield a list that collects the seconds of each computation on this rank."""
    times_s: list[float] = []
    stages = getattr(schedule, "_stages", None) or [schedule._stage]

    def record(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                times_s.append(time.perf_counter() - start)

        return call

    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    for stage in stages:
        for name in names:
            setattr(stage, name, record(getattr(stage, name)))
    try:
        yield times_s
    finally:
        for stage in stages:
            for name in names:
                delattr(stage, name)


def ideal_bubble(schedule: str) -> float:
    """Return the bubble of a schedule as a share of the step.

    Forward, backward by input and backward by weight take equal time; communication takes none.
    """
    p, m, v = RANKS, MICROBATCHES, 2
    ideal = {
        "gpipe": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "interleaved": (p - 1) / (v * m),
        "zero-bubble": (p - 1) / (3 * v * m),
        "zbv": 0.0,
    }
    return ideal[schedule] / (1 + ideal[schedule])


def measure_bubble(schedule: str) -> float:
    """Return the median measured bubble of a schedule as a share of the step."""
    step, engine = build_paceline(schedule)
    turns.time_block(step)
    bubbles = []
    for _ in range(3):
        with record_compute_times(engine) as times_s:
            block_s = turns.time_block(step) * turns.BLOCK
        busy_s = torch.tensor(sum(times_s))
        dist.all_reduce(busy_s)
        bubbles.append(1 - busy_s.item() / (RANKS * block_s))
    return statistics.median(bubbles)


def run_rank(rounds: int) -> None:
    name = f"pp={RANKS}, 1f1b, microbatches={MICROBATCHES}"
    turns.compare(name, build_paceline("1f1b")[0], build_handwritten(), rounds)
    turns.print_on_rank_0("schedule       bubble   formula")
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        bubbles = f"{measure_bubble(schedule):8.1%} {ideal_bubble(schedule):9.1%}"
        turns.print_on_rank_0(f"{schedule:12} {bubbles}")


if __name__ == "__main__":
    turns.main(__doc__, run_rank, (RANKS,))

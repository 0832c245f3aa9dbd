"""What torch's engines add to a step by themselves: trainings so small that there is hardly anything to compute or to send."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.bench.gather import busy_s
from paceline.bench.result import Row
from paceline.cluster.limits import usable_cores
from paceline.events import Step
from paceline.launch.pool import Ranks
from paceline.plan.plan import parse
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.loop import train
from paceline.training.process import keep_memory, threads_per_rank

WARM_UP = 3  # steps
LEAST = 5
WINDOW_S = 0.25
OTHERS = 0.08  # share of the machine that other programs may take
PATIENCE = 8.0  # how many times as long it may take for them to leave it
DEPTHS = (2, 6)  # blocks
SAMPLES = 2  # of a rank
TENSORS = 16  # of a block of the text task, which has two sums and one attention
SMALL: dict[str, Any] = {"width": 16, "heads": 4, "context": 16}
PLANS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "tp": "tp={}", "cp": "cp={}"}
UNITS = {"ddp": TENSORS, "zero1": TENSORS, "zero2": 1, "zero3": 1, "tp": 2, "cp": 1}  # of a block


class Points:
    """Batches of a number each."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)

    def batch_of(self, indices: list[int]) -> Tensor:
        return torch.zeros(len(indices), 1)


class Nothing(Task):
    """The least that can be trained: what its step takes is the loop's."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Points | None:
        return Points() if split == "train" else None

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.mse_loss(output, batch, reduction="none")


class Windows:
    """Pieces of a training in which other programs leave this machine alone. `pids`: of the ranks."""

    def __init__(self, seconds: float, pids: Sequence[int]):
        self.wanted_s, self.ranks = seconds, [psutil.Process(pid) for pid in pids]
        self.steps = 0
        self.clean: list[range] = []
        self.clean_s = self.all_s = 0.0

    def stop(self) -> bool:
        """After each step: whether that is enough."""
        self.steps += 1
        if self.steps < WARM_UP:
            return False
        if self.steps == WARM_UP:
            self._begin()
            return False
        took = time.perf_counter() - self.began
        if took < WINDOW_S:
            return False
        others = (busy_s() - self.busy_s - self._own_s() + self.own_s) / (took * (os.cpu_count() or 1))
        self.all_s += took
        if others < OTHERS:
            self.clean.append(range(self.first, self.steps))
            self.clean_s += took
        self._begin()
        done = sum(map(len, self.clean))
        return (done >= LEAST and self.clean_s >= self.wanted_s) or self.all_s > PATIENCE * self.wanted_s

    def _begin(self) -> None:
        self.first, self.began, self.busy_s, self.own_s = self.steps, time.perf_counter(), busy_s(), self._own_s()

    def _own_s(self) -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in self.ranks)


def step_s(spec: Spec, plan: str, seconds: float, pids: Sequence[int] = ()) -> float:
    """On each rank: the median of the steps of a training that fit into so many seconds, of those in which nobody else was busy here; the
    least tenth where there are none. Without validation, so that steps follow steps."""
    keep_memory()
    windows = Windows(seconds, pids)

    def stop() -> bool:
        return windows.stop() if dist.get_rank() == 0 else False

    task = load_task(spec.task, spec.set)
    dataset = type(task).dataset
    object.__setattr__(task, "dataset", lambda split: dataset(task, split) if split == "train" else None)
    found = [event.step_s for event in train(spec, parse(plan), task=task, stop=stop) if isinstance(event, Step)]
    clean = [found[at] for window in windows.clean for at in window if at < len(found)]
    return statistics.median(clean) if len(clean) >= LEAST else statistics.quantiles(found[WARM_UP:], n=10)[0]


def engines(ranks: int, budget_s: float) -> Iterator[Row]:
    """A row for each engine and number of its units: the seconds that it adds to a step; `step` is that of a training of nothing."""
    each_s = budget_s / (2 * len(PLANS) + 2 + 4) / 3
    crowd = max(1.0, ranks / usable_cores())
    threads = threads_per_rank(ranks, None)

    def row(engine: str, units: int, seconds: float) -> Row:
        return {"engine": engine, "ranks": ranks, "units": units, "median_s": seconds}

    with Ranks(1) as alone:

        def single(task: str, batch: int, **fields: Any) -> float:
            spec = Spec(task=task, set=fields, batch=batch, steps=10**6, threads=threads)
            return float(alone(step_s, spec, "single", each_s, alone.pids, timeout_s=120)[0])

        yield row("step", 0, single("paceline.bench.engines:Nothing", SAMPLES))
        own = {(depth, batch): single("text", batch, depth=depth, **SMALL) for depth in DEPTHS for batch in (SAMPLES, ranks * SAMPLES)}
    with Ranks(ranks) as together:

        def of(plan: str, batch: int, depth: int) -> float:
            spec = Spec(task="text", set={**SMALL, "depth": depth}, batch=batch, steps=10**6)
            return float(together(step_s, spec, plan, each_s, together.pids, timeout_s=120)[0])

        for engine, plan in PLANS.items():
            for depth in DEPTHS:
                batch = ranks * SAMPLES
                here = SAMPLES if "=" not in plan else batch  # others split the model, not the samples
                added = of(plan.format(ranks), batch, depth) - crowd * own[depth, here]
                yield row(engine, depth * UNITS[engine], max(0.0, added))
        for micro in (ranks, 3 * ranks):  # of SAMPLES each; the rank computes its share of the blocks for each of them
            took = of(f"pp={ranks},micro={micro}", micro * SAMPLES, DEPTHS[-1])
            yield row("pp", micro, max(0.0, took - crowd * (micro + ranks - 1 if crowd == 1 else micro) / ranks * own[DEPTHS[-1], SAMPLES]))

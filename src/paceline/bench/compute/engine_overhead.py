"""What torch's engines add to a step by themselves: trainings so small that there is hardly anything to compute or to send."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.bench.collect import busy_s
from paceline.bench.result import Row
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory, threads_per_rank
from paceline.events import Step
from paceline.launch.rank_pool import Ranks
from paceline.plan.cost_model.engine_overhead import UnitCounts, units
from paceline.plan.cost_model.work_split import shares, split
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import parse
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.loop import train
from paceline.training.model_facts.describe import describe

WARM_UP = 3  # steps
LEAST = 5
WINDOW_S = 0.25
OTHERS = 0.08  # share of the machine that other programs may take
PATIENCE = 8.0  # how many times as long it may take for them to leave it
DEPTHS = (2, 6)  # blocks
SAMPLES = 2  # of a rank
SMALL: dict[str, Any] = {"width": 16, "heads": 4, "context": 16}
PLANS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "tp": "tp={}", "cp": "cp={}"}


@dataclass(frozen=True)
class Points:
    """Batches of some numbers each."""

    width: int

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(self.width)

    def batch_of(self, indices: list[int]) -> Tensor:
        return torch.zeros(len(indices), self.width)


class EmptyTask(Task):
    """The least that can be trained: what its step takes is the loop's."""

    width: int = 1

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width)

    def dataset(self, split: str) -> Points | None:
        return Points(self.width) if split == "train" else None

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.mse_loss(output, batch, reduction="none")


class LayeredTask(EmptyTask):
    """Blocks of two tensors each, where one of the text task has a dozen."""

    width: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(part for _ in range(DEPTHS[-1]) for part in (nn.Linear(self.width, self.width), nn.ReLU()))
        )


class QuietWindows:
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
        self.first, self.began, self.busy_s, self.own_s = (
            self.steps,
            time.perf_counter(),
            busy_s(),
            self._own_s(),
        )

    def _own_s(self) -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in self.ranks)


def step_s(spec: Spec, plan: str, seconds: float, pids: Sequence[int] = ()) -> float:
    """On each rank: the median of the steps of a training that fit into so many seconds, of those in which nobody else was busy here; the
    least tenth where there are none. Without validation, so that steps follow steps."""
    keep_freed_memory()
    windows = QuietWindows(seconds, pids)

    def stop() -> bool:
        return windows.stop() if dist.get_rank() == 0 else False

    task = load_task(spec.task, spec.set)
    dataset = type(task).dataset
    object.__setattr__(task, "dataset", lambda split: dataset(task, split) if split == "train" else None)
    found = [
        event.step_s for event in train(spec, parse(plan), task=task, stop=stop) if isinstance(event, Step)
    ]
    clean = [found[at] for window in windows.clean for at in window if at < len(found)]
    return statistics.median(clean) if len(clean) >= LEAST else statistics.quantiles(found[WARM_UP:], n=10)[0]


@dataclass(frozen=True)
class SmallTraining:
    """A training with hardly anything to compute."""

    task: str
    depth: int | None = None

    def spec(self, batch: int, threads: int | None = None) -> Spec:
        fields = {**SMALL, "depth": self.depth} if self.depth is not None else {}
        return Spec(task=self.task, set=fields, batch=batch, steps=10**6, threads=threads)

    def units(self, engine: str, plan: str, ranks: int, batch: int) -> UnitCounts:
        on = split(parse(plan), ranks, batch)
        return units(shares(_facts(self), 1, 1, even=False, folded=False)[0], on)[engine]


@cache
def _facts(small: SmallTraining) -> ModelFacts:
    spec = small.spec(SAMPLES)
    return describe(spec, load_task(spec.task, spec.set))


NOTHING, LAYERS = (
    SmallTraining("paceline.bench.compute.engine_overhead:Nothing"),
    SmallTraining("paceline.bench.compute.engine_overhead:Layers"),
)
TEXTS = [SmallTraining("text", depth) for depth in DEPTHS]


def engines(ranks: int, budget_s: float) -> Iterator[Row]:
    """A row for each engine and number of its units: the seconds that it adds to a step; `step` is that of a training of nothing."""
    each_s = budget_s / 32 / 3  # trainings; a third of the time is theirs, the rest goes by around them
    crowd = max(1.0, ranks / usable_cores())
    threads = threads_per_rank(ranks, None)
    batch = ranks * SAMPLES

    def row(engine: str, of: UnitCounts, seconds: float) -> Row:
        return {
            "engine": engine,
            "ranks": ranks,
            "units": of.units,
            "tensors": of.tensors,
            "median_s": max(0.0, seconds),
        }

    with Ranks(1) as alone:

        def single(small: SmallTraining, samples: int, plan: str = "single") -> float:
            return float(
                alone(step_s, small.spec(samples, threads), plan, each_s, alone.pids, timeout_s=120)[0]
            )

        yield row("step", UnitCounts(), single(NOTHING, SAMPLES))
        own = {
            (small, samples): single(small, samples)
            for small in (*TEXTS, LAYERS)
            for samples in (SAMPLES, batch)
        }
        again = "single,recompute=selective"
        for small in (LAYERS, TEXTS[-1]):
            yield row(
                "selective",
                small.units("selective", again, 1, SAMPLES),
                single(small, SAMPLES, again) - own[small, SAMPLES],
            )
    with Ranks(ranks) as together:

        def of(small: SmallTraining, plan: str, samples: int) -> float:
            return float(together(step_s, small.spec(samples), plan, each_s, together.pids, timeout_s=120)[0])

        for engine, said in PLANS.items():
            plan = said.format(ranks)
            here = SAMPLES if "=" not in plan else batch  # others split the model, not the samples
            for small in TEXTS if engine == "cp" else (*TEXTS, LAYERS):
                added = of(small, plan, batch) - crowd * own[small, here]
                yield row(engine, small.units(engine, plan, ranks, batch), added)
        deep = TEXTS[-1]
        for microbatches in (
            ranks,
            3 * ranks,
        ):  # of SAMPLES each; the rank computes its share of the blocks for each of them
            took = of(deep, f"pp={ranks},microbatches={microbatches}", microbatches * SAMPLES)
            computes = (
                crowd
                * (microbatches + ranks - 1 if crowd == 1 else microbatches)
                / ranks
                * own[deep, SAMPLES]
            )
            yield row("pp", UnitCounts(microbatches), took - computes)

"""Overhead that torch's engines add to a step, measured on trainings with almost no work."""

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
from paceline.bench.collect import cpu_busy_s
from paceline.bench.result import Row
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory, threads_per_rank
from paceline.events import Step
from paceline.launch.rank_pool import Ranks
from paceline.plan.cost_model.engine_overhead import UnitCounts, count_units
from paceline.plan.cost_model.work_split import assign_stages, split_work
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import parse
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.model_facts.describe import describe
from paceline.training.train import train

WARMUP_STEPS = 3
MIN_STEPS = 5
WINDOW_S = 0.25
MAX_OTHER_SHARE = 0.08  # share of the machine that other programs may use in a quiet window
MAX_WAIT_FACTOR = 8.0  # give up after this multiple of the wanted seconds
DEPTHS = (2, 6)  # blocks
SAMPLES = 2  # per rank
SMALL: dict[str, Any] = {"width": 16, "heads": 4, "context": 16}
PLANS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "tp": "tp={}", "cp": "cp={}"}


@dataclass(frozen=True)
class Points:
    """A data set of zero vectors."""

    width: int

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(self.width)

    def batch_of(self, indices: list[int]) -> Tensor:
        return torch.zeros(len(indices), self.width)


class EmptyTask(Task):
    """The smallest possible training: its step time is the overhead of the loop."""

    width: int = 1

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width)

    def dataset(self, split: str) -> Points | None:
        return Points(self.width) if split == "train" else None

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.mse_loss(output, batch, reduction="none")


class LayeredTask(EmptyTask):
    """Blocks of two tensors each; a block of the text task has a dozen."""

    width: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(part for _ in range(DEPTHS[-1]) for part in (nn.Linear(self.width, self.width), nn.ReLU()))
        )


class QuietWindows:
    """Windows of a training in which other programs hardly use this machine.

    seconds: wanted length of all quiet windows together.
    pids: processes of the ranks.
    """

    def __init__(self, seconds: float, pids: Sequence[int]):
        self.wanted_s, self.ranks = seconds, [psutil.Process(pid) for pid in pids]
        self.steps = 0
        self.quiet: list[range] = []  # steps of each quiet window
        self.quiet_s = self.all_s = 0.0

    def stop(self) -> bool:
        """Return whether the windows suffice. Called after each step."""
        self.steps += 1
        if self.steps < WARMUP_STEPS:
            return False
        if self.steps == WARMUP_STEPS:
            self._begin()
            return False
        window_s = time.perf_counter() - self.start
        if window_s < WINDOW_S:
            return False
        other_s = cpu_busy_s() - self.busy_s - self._own_s() + self.own_s
        self.all_s += window_s
        if other_s / (window_s * (os.cpu_count() or 1)) < MAX_OTHER_SHARE:
            self.quiet.append(range(self.first, self.steps))
            self.quiet_s += window_s
        self._begin()
        enough = sum(map(len, self.quiet)) >= MIN_STEPS and self.quiet_s >= self.wanted_s
        return enough or self.all_s > MAX_WAIT_FACTOR * self.wanted_s

    def _begin(self) -> None:
        """Begin a window."""
        self.first, self.start = self.steps, time.perf_counter()
        self.busy_s, self.own_s = cpu_busy_s(), self._own_s()

    def _own_s(self) -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in self.ranks)


def time_training_step(spec: Spec, plan: str, seconds: float, pids: Sequence[int] = ()) -> float:
    """Return the median step time of a training in quiet windows of `seconds` together. Runs on each rank.

    Without enough quiet steps, return the lowest decile of all steps. Validation is disabled, so that no
    other work comes between steps.
    """
    keep_freed_memory()
    windows = QuietWindows(seconds, pids)

    def stop() -> bool:
        return windows.stop() if dist.get_rank() == 0 else False

    task = load_task(spec.task, spec.set)
    dataset = type(task).dataset
    object.__setattr__(task, "dataset", lambda split: dataset(task, split) if split == "train" else None)
    times_s = [
        event.step_s for event in train(spec, parse(plan), task=task, stop=stop) if isinstance(event, Step)
    ]
    quiet_s = [times_s[step] for window in windows.quiet for step in window if step < len(times_s)]
    if len(quiet_s) >= MIN_STEPS:
        return statistics.median(quiet_s)
    return statistics.quantiles(times_s[WARMUP_STEPS:], n=10)[0]


@dataclass(frozen=True)
class SmallTraining:
    """A training with hardly anything to compute."""

    task: str
    depth: int | None = None

    def spec(self, batch: int, threads: int | None = None) -> Spec:
        fields = {**SMALL, "depth": self.depth} if self.depth is not None else {}
        return Spec(task=self.task, set=fields, batch=batch, steps=10**6, threads=threads)

    def units(self, engine: str, plan: str, ranks: int, batch: int) -> UnitCounts:
        """Return the units and tensors that an engine handles in a step."""
        work_split = split_work(parse(plan), ranks, batch)
        return count_units(assign_stages(_facts(self), 1, 1, even=False, folded=False)[0], work_split)[engine]


@cache
def _facts(small: SmallTraining) -> ModelFacts:
    spec = small.spec(SAMPLES)
    return describe(spec, load_task(spec.task, spec.set))


EMPTY = SmallTraining("paceline.bench.compute.engine_overhead:EmptyTask")
LAYERED = SmallTraining("paceline.bench.compute.engine_overhead:LayeredTask")
TEXTS = [SmallTraining("text", depth) for depth in DEPTHS]


def measure_engines(ranks: int, budget_s: float) -> Iterator[Row]:
    """Yield a row for each engine and number of units, with the seconds that the engine adds to a step.

    The engine `step` is the whole step of the empty training.
    """
    each_s = budget_s / 32 / 3  # 32 trainings; their steps take a third of the time, start and end the rest
    ranks_per_core = max(1.0, ranks / usable_cores())
    threads = threads_per_rank(ranks, None)
    batch = ranks * SAMPLES

    def row(engine: str, counts: UnitCounts, seconds: float) -> Row:
        return {
            "engine": engine,
            "ranks": ranks,
            "units": counts.units,
            "tensors": counts.tensors,
            "median_s": max(0.0, seconds),
        }

    with Ranks(1) as one_rank:

        def single(small: SmallTraining, samples: int, plan: str = "single") -> float:
            spec = small.spec(samples, threads)
            return float(one_rank(time_training_step, spec, plan, each_s, one_rank.pids, timeout_s=120)[0])

        yield row("step", UnitCounts(), single(EMPTY, SAMPLES))
        single_s = {
            (small, samples): single(small, samples)
            for small in (*TEXTS, LAYERED)
            for samples in (SAMPLES, batch)
        }
        selective = "single,recompute=selective"
        for small in (LAYERED, TEXTS[-1]):
            yield row(
                "selective",
                small.units("selective", selective, 1, SAMPLES),
                single(small, SAMPLES, selective) - single_s[small, SAMPLES],
            )
    with Ranks(ranks) as all_ranks:

        def parallel(small: SmallTraining, plan: str, samples: int) -> float:
            spec = small.spec(samples)
            return float(all_ranks(time_training_step, spec, plan, each_s, all_ranks.pids, timeout_s=120)[0])

        for engine, pattern in PLANS.items():
            plan = pattern.format(ranks)
            samples = SAMPLES if "=" not in plan else batch  # tp and cp split the model, not the samples
            for small in TEXTS if engine == "cp" else (*TEXTS, LAYERED):
                added_s = parallel(small, plan, batch) - ranks_per_core * single_s[small, samples]
                yield row(engine, small.units(engine, plan, ranks, batch), added_s)
        deep = TEXTS[-1]
        # Micro-batches of SAMPLES samples; each rank computes its share of the blocks for each of them.
        for microbatches in (ranks, 3 * ranks):
            step_s = parallel(deep, f"pp={ranks},microbatches={microbatches}", microbatches * SAMPLES)
            slots = microbatches + ranks - 1 if ranks_per_core == 1 else microbatches
            compute_s = ranks_per_core * slots / ranks * single_s[deep, SAMPLES]
            yield row("pp", UnitCounts(microbatches), step_s - compute_s)

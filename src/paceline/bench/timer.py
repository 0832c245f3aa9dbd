"""Times a piece of work again and again: warm-up apart, as often as a budget of seconds allows, on several ranks as one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Budget:
    """As many repetitions as fit into `seconds`, from `least` to `most`; before them a warm-up that is not counted."""

    seconds: float = 0.2
    warmup_s: float = 0.05
    least: int = 5
    most: int = 1000

    def repetitions(self, once_s: float) -> int:
        return self._fitting(self.seconds, once_s, self.least)

    def warmups(self, once_s: float) -> int:
        return self._fitting(self.warmup_s, once_s, 1)

    def _fitting(self, seconds: float, once_s: float, least: int) -> int:
        return min(self.most, max(least, int(seconds / once_s) if once_s > 0 else self.most))


@dataclass(frozen=True)
class Timing:
    """Of one repetition, in seconds. `spread`: between the quartiles, as a share of the median; `n`: repetitions."""

    median_s: float
    min_s: float
    p95_s: float
    spread: float
    n: int

    def fields(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True)
class Clock:
    """`mark()` notes a moment; `seconds(marks)` waits until all of them are past, and says how long after the first each was."""

    mark: Callable[[], Any]
    seconds: Callable[[list[Any]], list[float]]


def _since_first(marks: list[float]) -> list[float]:
    return [mark - marks[0] for mark in marks]


WALL = Clock(time.perf_counter, _since_first)


def synchronized(synchronize: Callable[[], object]) -> Clock:
    """The wall clock, after the device has done all that it was asked to."""

    def mark() -> float:
        synchronize()
        return time.perf_counter()

    return Clock(mark, _since_first)


def cuda_events() -> Clock:
    """Events in the current CUDA stream: nothing waits between repetitions."""
    import torch

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(marks: list[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]

    return Clock(mark, seconds)


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


def measure(
    run: Callable[[], object],
    budget: Budget | None = None,
    clock: Clock = WALL,
    largest: Callable[[Sequence[float]], list[float]] = alone,
) -> Timing:
    """Time `run`, back to back as nccl-tests does, without anything in between.

    largest: of each value the largest over the ranks that run the same work; a meeting of them, too. With it all ranks make the same
    number of repetitions, and a repetition ends when its last rank is done: its time is that between two such ends.
    """
    budget = budget or Budget()
    once_s = largest(_ends(run, 1, clock))[-1]  # cold: what is set up at first use is in it
    warmups = budget.warmups(once_s)
    once_s = largest(_ends(run, warmups, clock))[-1] / warmups
    return timing(largest(_ends(run, budget.repetitions(once_s), clock)))


def _ends(run: Callable[[], object], repetitions: int, clock: Clock) -> list[float]:
    mark = clock.mark
    marks = [mark()]
    for _ in range(repetitions):
        run()
        marks.append(mark())
    return clock.seconds(marks)


def timing(ends_s: Sequence[float]) -> Timing:
    """From the ends of repetitions, of which the first is where they began."""
    times = [after - before for before, after in pairwise(ends_s)]
    low, median, high, p95 = (float(value) for value in np.percentile(times, (25, 50, 75, 95)))
    return Timing(median, min(times), p95, (high - low) / median if median else 0.0, len(times))

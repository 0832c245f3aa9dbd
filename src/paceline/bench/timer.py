"""Time a function repeatedly within a budget of seconds, after a warm-up, on one process or on many ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Budget:
    """As many repetitions as fit into `seconds`, within the given counts, after an untimed warm-up."""

    seconds: float = 0.2
    warmup_s: float = 0.05
    min_count: int = 5
    max_count: int = 1000

    def repetitions(self, once_s: float) -> int:
        return self._count(self.seconds, once_s, self.min_count)

    def warmups(self, once_s: float) -> int:
        return self._count(self.warmup_s, once_s, 1)

    def _count(self, seconds: float, once_s: float, min_count: int) -> int:
        return min(self.max_count, max(min_count, int(seconds / once_s) if once_s > 0 else self.max_count))


@dataclass(frozen=True)
class Timing:
    """Seconds of one repetition.

    spread: interquartile range, as a share of the median.
    n: number of repetitions.
    """

    median_s: float
    min_s: float
    p95_s: float
    spread: float
    n: int

    def fields(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True)
class Clock:
    """A source of time.

    mark: record the present moment.
    seconds: wait until all marks have passed; return the seconds of each since the first.
    """

    mark: Callable[[], Any]
    seconds: Callable[[list[Any]], list[float]]


def _since_first(marks: list[float]) -> list[float]:
    return [mark - marks[0] for mark in marks]


WALL = Clock(time.perf_counter, _since_first)


def synchronized_clock(synchronize: Callable[[], object]) -> Clock:
    """Return a wall clock that waits until the device has finished its work before each mark."""

    def mark() -> float:
        synchronize()
        return time.perf_counter()

    return Clock(mark, _since_first)


def cuda_event_clock() -> Clock:
    """Return a clock of CUDA events in the current stream: the host does not wait between repetitions."""
    import torch

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(marks: list[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]

    return Clock(mark, seconds)


def own_values(values: Sequence[float]) -> list[float]:
    """Return the values of this process, as the maximum over a single rank."""
    return list(values)


def measure(
    run: Callable[[], object],
    budget: Budget | None = None,
    clock: Clock = WALL,
    all_reduce_max: Callable[[Sequence[float]], list[float]] = own_values,
) -> Timing:
    """Time `run`, back to back as nccl-tests does, with nothing between repetitions.

    all_reduce_max: element-wise maximum over the ranks that run the same work; it also synchronizes them.
    With it, all ranks make the same number of repetitions. A repetition ends when its last rank has finished;
    its time is the time since the end of the previous repetition.
    """
    budget = budget or Budget()
    once_s = all_reduce_max(_end_times(run, 1, clock))[-1]  # cold: includes setup at first use
    warmups = budget.warmups(once_s)
    once_s = all_reduce_max(_end_times(run, warmups, clock))[-1] / warmups
    return summarize_times(all_reduce_max(_end_times(run, budget.repetitions(once_s), clock)))


def _end_times(run: Callable[[], object], repetitions: int, clock: Clock) -> list[float]:
    """Return the start time and the end time of each repetition, in seconds."""
    mark = clock.mark
    marks = [mark()]
    for _ in range(repetitions):
        run()
        marks.append(mark())
    return clock.seconds(marks)


def summarize_times(ends_s: Sequence[float]) -> Timing:
    """Return the Timing of repetitions. `ends_s`: the start of the first, then the end of each."""
    times = [after - before for before, after in pairwise(ends_s)]
    low, median, high, p95 = (float(value) for value in np.percentile(times, (25, 50, 75, 95)))
    return Timing(median, min(times), p95, (high - low) / median if median else 0.0, len(times))

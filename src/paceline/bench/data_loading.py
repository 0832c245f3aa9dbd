"""Rates of reading a task's samples, by workers and prefetch, next to the rate of its training step."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch

from paceline.bench.compute.kernels import first_line
from paceline.bench.compute.step import prepare_step, time_step
from paceline.bench.data_stages import advise, check_workers, measure_stages, quality_row
from paceline.bench.result import Row
from paceline.bench.timer import summarize_times
from paceline.cluster.limits import usable_cores
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import check_batch, choose_order, open_training_samples
from paceline.data.samples import Batch, Samples
from paceline.errors import Error
from paceline.spec import Spec
from paceline.task import Task

KEYS = ("what", "workers", "prefetch")
ENDLESS_STEPS = 10**9
MAX_WAIT_SHARE = 0.05  # of the step time; a step that waits less is not limited by reading
MEMORY_INTERVAL_S = 0.2  # between two readings of the memory


def loader_settings(workers: Sequence[int], prefetch: Sequence[int]) -> list[tuple[int, int]]:
    """Return all pairs (workers, batches that each reads ahead). Without workers, nothing is read ahead."""
    return [(count, ahead) for count in workers for ahead in (prefetch if count else (1,))]


def default_worker_counts() -> list[int]:
    """Return 0 and the powers of two up to the number of usable cores."""
    return [0, *(2**power for power in range(usable_cores().bit_length()))]


def measure(
    spec: Spec, task: Task, device: torch.device, budget_s: float, settings: Sequence[tuple[int, int]]
) -> Iterator[Row | str]:
    """Yield a row for the step, and two for each (workers, prefetch) of `settings`.

    The two rows are reading alone at full speed, and reading with a step on each batch. Reading uses the
    loader of a training on the training split. Raises DataError if samples cannot be read.
    """
    training = open_training_samples(task, spec)
    check_batch(spec.batch, training.count)
    each_s = budget_s / (2 + 2 * len(settings))
    stages = [*measure_stages(training, spec, each_s), quality_row(training, spec)]
    yield from stages
    with contextlib.ExitStack() as stack:
        step = None
        try:
            ready_step = stack.enter_context(prepare_step(spec, task, device))
            step_timing = time_step(ready_step, each_s)
        except (Error, RuntimeError, NotImplementedError) as error:
            yield f"the training step failed, so reading is not compared with it: {first_line(error)}"
        else:
            yield {"what": "step", "per_s": spec.batch / step_timing.median_s, **step_timing.fields()}
            step = ready_step.on
        max_passes, measured = 0.0, [*stages]
        if step is not None:
            measured.append({"what": "step", "per_s": spec.batch / step_timing.median_s})
        for setting in settings:
            for work in (None, step) if step is not None else (None,):
                row = _measure_setting(training, spec, device, each_s, setting, work)
                max_passes = max(max_passes, float(row["passes"]))
                measured.append(row)
                yield row
    yield from advise(training, measured)
    if (more := check_workers(measured)) is not None:
        yield more
    if max_passes > 1:
        yield (
            f"the {training.count:,} samples were read up to {max_passes:,.1f} times: "
            "if they come from files, mostly from the page cache"
        )


def _measure_setting(
    training: Samples,
    spec: Spec,
    device: torch.device,
    budget_s: float,
    setting: tuple[int, int],
    work: Callable[[Batch], object] | None,
) -> dict[str, Any]:
    """Return the row of one (workers, prefetch); `work` is called with each batch."""
    workers, prefetch = setting
    parts = training_parts(
        RankBatchSlice(spec.batch, 1, 0, 1), choose_order(training, spec), 0, ENDLESS_STEPS
    )
    memory = MemoryGrowth()
    start = time.perf_counter()
    with contextlib.closing(batches(training, parts, device, workers, prefetch)) as source:
        next(source)
        first_s = time.perf_counter() - start
        deadline = time.perf_counter() + budget_s
        # Batches that were read ahead during the start are not counted.
        for batch in _take_until(source, time.perf_counter() + budget_s / 5, workers * prefetch):
            if work is not None:
                work(batch)
        wait_s, ends = 0.0, [time.perf_counter()]
        memory_bytes, read_at = memory.growth_bytes(), time.perf_counter()
        while len(ends) < 4 or ends[-1] < deadline:
            batch = next(source)
            wait_s += time.perf_counter() - ends[-1]
            if work is not None:
                work(batch)
            _synchronize(device)
            ends.append(time.perf_counter())
            if ends[-1] - read_at > MEMORY_INTERVAL_S:
                memory_bytes, read_at = max(memory_bytes, memory.growth_bytes()), time.perf_counter()
    seconds = ends[-1] - ends[0]
    what = "read" if work is None else "read and step"
    row: dict[str, Any] = {"what": what, "workers": workers, "prefetch": prefetch if workers else None}
    row |= {"per_s": (len(ends) - 1) * spec.batch / seconds, "first_s": first_s, "memory_bytes": memory_bytes}
    row["passes"] = (len(ends) - 1) * spec.batch / training.count
    return (
        row | ({"wait_share": wait_s / seconds} if work is not None else {}) | summarize_times(ends).fields()
    )


def _take_until(source: Iterator[Batch], deadline: float, count: int) -> Iterator[Batch]:
    """Yield up to `count` batches, as long as the deadline has not passed."""
    for _ in range(count):
        if time.perf_counter() < deadline:
            yield next(source)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MemoryGrowth:
    """The memory that this process and its workers gained since creation; shared memory counts once."""

    def __init__(self) -> None:
        self._before = self._bytes()

    def growth_bytes(self) -> int:
        return max(0, self._bytes() - self._before)

    def _bytes(self) -> int:
        this_process = psutil.Process()
        total = 0
        for process in (this_process, *this_process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                total += getattr(info, "pss", info.rss)
        return total


def summarize(rows: Sequence[Any]) -> list[Row]:
    """Return the first setting with which the step hardly waits, else the setting with the fastest step."""
    step_per_s = next((row["per_s"] for row in rows if row["what"] == "step"), None)
    combined = [row for row in rows if row["what"] == "read and step"]
    if step_per_s is None or not combined:
        return []
    enough = next((row for row in combined if row["wait_share"] <= MAX_WAIT_SHARE), None)
    best = enough or max(combined, key=lambda row: float(row["per_s"]))
    summary = {name: best[name] for name in ("workers", "prefetch", "wait_share")}
    return [summary | {"limits": enough is None, "share_of_step": best["per_s"] / step_per_s}]

"""How many samples of a task can be read in a second, by workers and batches ahead, beside how many its step takes in."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch

from paceline.bench.compute.kernels import first_line
from paceline.bench.compute.step import ready, time_step
from paceline.bench.result import Row
from paceline.bench.timer import timing
from paceline.cluster.limits import usable_cores
from paceline.data.loader import (
    Batch,
    RankBatchSlice,
    Samples,
    batches,
    check_batch,
    open_dataset,
    training_parts,
)
from paceline.errors import Error
from paceline.spec import Spec
from paceline.task import Task

KEYS = ("what", "workers", "prefetch")
ENDLESS = 10**9  # steps
HARDLY = 0.05  # of its time: a step that waits less than that for samples is not held up by them
WATCHED_S = 0.2  # between two looks at the memory


def ways(workers: Sequence[int], prefetch: Sequence[int]) -> list[tuple[int, int]]:
    """(workers, batches ahead of each); without workers nothing is read ahead."""
    return [(count, ahead) for count in workers for ahead in (prefetch if count else (1,))]


def up_to_cores() -> list[int]:
    """None, one, and twice as many again and again, to the cores there are."""
    return [0, *(2**power for power in range(usable_cores().bit_length()))]


def measure(
    spec: Spec, task: Task, device: torch.device, budget_s: float, how: Sequence[tuple[int, int]]
) -> Iterator[Row | str]:
    """A row for the step alone, and for each way two: the training split read as quickly as can be, and read by its steps.

    Read by what reads it in a training. Raises DataError for samples that cannot be read.
    """
    dataset = open_dataset(task, "train")
    assert dataset is not None
    training = Samples(dataset, "train", spec.seed, torch.float64 if spec.precision == "fp64" else None)
    each_s = budget_s / (1 + 2 * len(how))
    with contextlib.ExitStack() as stack:
        step = None
        try:
            stepping = stack.enter_context(ready(spec, task, device))
            alone = time_step(stepping, each_s)
        except (Error, RuntimeError, NotImplementedError) as error:
            yield f"the task cannot be stepped, so there is nothing to hold reading against: {first_line(error)}"
        else:
            yield {"what": "step", "per_s": spec.batch / alone.median_s, **alone.fields()}
            step = stepping.on
        most = 0.0
        for way in how:
            for work in (None, step) if step is not None else (None,):
                row = _measured(training, spec, device, each_s, way, work)
                most = max(most, float(row["passes"]))
                yield row
    if most > 1:
        yield f"the {len(dataset):,} samples were read up to {most:,.1f} times over: where they come from files, mostly from the page cache"


def _measured(
    training: Samples,
    spec: Spec,
    device: torch.device,
    budget_s: float,
    way: tuple[int, int],
    work: Callable[[Batch], object] | None,
) -> dict[str, Any]:
    check_batch(spec.batch, training.count)
    workers, prefetch = way
    parts = training_parts(RankBatchSlice(spec.batch, 1, 0, 1), training.count, spec.seed, 0, ENDLESS)
    before = MemoryGrowth()
    began = time.perf_counter()
    with contextlib.closing(batches(training, parts, device, workers, prefetch)) as source:
        next(source)
        first_s = time.perf_counter() - began
        deadline = time.perf_counter() + budget_s
        for batch in _until(
            source, time.perf_counter() + budget_s / 5, workers * prefetch
        ):  # what had been read ahead meanwhile
            if work is not None:
                work(batch)
        wait_s, ends = 0.0, [time.perf_counter()]
        memory_bytes, watched = before.more(), time.perf_counter()
        while len(ends) < 4 or ends[-1] < deadline:
            batch = next(source)
            wait_s += time.perf_counter() - ends[-1]
            if work is not None:
                work(batch)
            _synchronize(device)
            ends.append(time.perf_counter())
            if ends[-1] - watched > WATCHED_S:
                memory_bytes, watched = max(memory_bytes, before.more()), time.perf_counter()
    seconds = ends[-1] - ends[0]
    what = "read" if work is None else "read and step"
    row: dict[str, Any] = {"what": what, "workers": workers, "prefetch": prefetch if workers else None}
    row |= {"per_s": (len(ends) - 1) * spec.batch / seconds, "first_s": first_s, "memory_bytes": memory_bytes}
    row["passes"] = (len(ends) - 1) * spec.batch / training.count
    return row | ({"wait_share": wait_s / seconds} if work is not None else {}) | timing(ends).fields()


def _until(source: Iterator[Batch], deadline: float, count: int) -> Iterator[Batch]:
    for _ in range(count):
        if time.perf_counter() < deadline:
            yield next(source)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MemoryGrowth:
    """What this process and its workers have taken since; memory that several of them share is counted once."""

    def __init__(self) -> None:
        self._before = self._bytes()

    def more(self) -> int:
        return max(0, self._bytes() - self._before)

    def _bytes(self) -> int:
        own = psutil.Process()
        found = 0
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                found += getattr(info, "pss", info.rss)
        return found


def summary(rows: Sequence[Any]) -> list[Row]:
    """The first way to read with which the step hardly waits; else the one with which it is quickest."""
    own = next((row["per_s"] for row in rows if row["what"] == "step"), None)
    together = [row for row in rows if row["what"] == "read and step"]
    if own is None or not together:
        return []
    enough = next((row for row in together if row["wait_share"] <= HARDLY), None)
    told = enough or max(together, key=lambda row: float(row["per_s"]))
    found = {name: told[name] for name in ("workers", "prefetch", "wait_share")}
    return [found | {"limits": enough is None, "share_of_step": told["per_s"] / own}]

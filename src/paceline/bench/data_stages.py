"""What reading a sample consists of, the quality of the order, and what would make reading faster."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.result import Row
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.folder import Folder, FolderFiles
from paceline.data.open_samples import choose_order, find_streams
from paceline.data.order import Order
from paceline.data.samples import FailedSample, Samples
from paceline.errors import DataError
from paceline.spec import Spec
from paceline.user_code import UserCode

MAX_BATCHES = 10**6
NUM_ORDERED = 100_000  # samples of the order that are judged
MANY_FILES = 10_000
MAX_CORRELATION = 0.2  # between the labels of neighbors, above which batches are not mixed
MIN_SHARE = 0.5  # of the time of a sample, for a stage that is worth mentioning


def measure_stages(training: Samples, spec: Spec, budget_s: float) -> Iterator[Row]:
    """Yield a row for each stage of reading a batch in this process, in samples/s.

    `get` is [i] of the dataset. A `Folder` has `fetch` (the bytes) and `decode` instead. `collate` makes the
    batch. The samples are those of a training, from the middle of its first epoch on, so that the page cache
    has few of them. Nothing is measured if the first batch fails. Raises DataError.
    """
    if hasattr(training.dataset, "batch_of"):
        return
    order = choose_order(training, spec)
    first = 0 if find_streams(training.dataset) else order.epoch_samples // 2 // spec.batch
    parts = training_parts(RankBatchSlice(spec.batch, 1, 0, 1), order, first, MAX_BATCHES + first)
    if isinstance(training[next(parts)], FailedSample):
        return  # the loader reports it
    spent: dict[str, float] = {}
    count, read_bytes = 0, 0
    deadline = time.perf_counter() + budget_s
    for numbers, indices in parts:
        before = _read_bytes()
        samples = []
        for index in indices:
            with UserCode(f"sample {index} of {training.split!r}", raises=DataError):
                samples.append(_time_sample(training.dataset, index, spent))
        read_bytes += _read_bytes() - before
        begin = time.perf_counter()
        with UserCode("collating samples", raises=DataError):
            training.collate_samples(samples, numbers, indices)
        spent["collate"] = spent.get("collate", 0.0) + time.perf_counter() - begin
        count += len(indices)
        if time.perf_counter() > deadline:
            break
    whole = sum(spent.values())
    for stage, seconds in spent.items():
        row: dict[str, Any] = {"what": stage, "per_s": count / seconds, "share": seconds / whole}
        if stage in ("get", "fetch"):
            row["sample_bytes"] = read_bytes / count
        yield row


def _time_sample(dataset: Any, index: int, spent: dict[str, float]) -> Any:
    begin = time.perf_counter()
    if not isinstance(dataset, Folder) or dataset.decode is None:
        sample = dataset[index]
        spent["get"] = spent.get("get", 0.0) + time.perf_counter() - begin
        return sample
    content, label = dataset.fetch(index)
    fetched = time.perf_counter()
    sample = dataset.decode(content), label
    spent["fetch"] = spent.get("fetch", 0.0) + fetched - begin
    spent["decode"] = spent.get("decode", 0.0) + time.perf_counter() - fetched
    return sample


def _read_bytes() -> int:
    """Return the bytes that this process has read by system calls, from caches or disks."""
    try:
        with open("/proc/self/io", "rb") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True)
class ShuffleQuality:
    """How well an order mixes the samples.

    displacement       mean distance between the place of a sample in the order and in the dataset, as a
                       share of that of a random order, a third of the dataset
    label_correlation  between the labels of neighbors in the order; None: the dataset has no `labels`
    """

    displacement: float
    label_correlation: float | None


def judge_order(order: Order, samples: int, labels: Any = None) -> ShuffleQuality:
    """Return the quality of the first NUM_ORDERED samples of an order of a dataset of `samples`."""
    numbers = np.arange(min(samples, order.epoch_samples, NUM_ORDERED))
    indices = order.indices(numbers)
    displacement = float(np.abs(indices - numbers).mean())
    # of a uniform place in [0, n) and each number: the mean over both
    expected = float(np.mean(numbers**2 + (samples - numbers) ** 2) / (2 * samples))
    correlation = None
    if labels is not None and len(labels) == samples and len(indices) > 2:
        of_order = np.asarray(labels)[indices].astype(float)
        if of_order[:-1].std() and of_order[1:].std():
            correlation = float(np.corrcoef(of_order[:-1], of_order[1:])[0, 1])
    return ShuffleQuality(displacement / expected, correlation)


def quality_row(training: Samples, spec: Spec) -> Row:
    """Return the row of the quality of the order of a training."""
    dataset = training.dataset
    quality = judge_order(choose_order(training, spec), training.count, getattr(dataset, "labels", None))
    return {
        "what": "order",
        "shuffle": spec.data.shuffle,
        "displacement": quality.displacement,
        "label_correlation": quality.label_correlation,
    }


def advise(training: Samples, rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences on what would make reading faster, or the order better."""
    stages = {row["what"]: row for row in rows if "share" in row}
    files = getattr(training.dataset, "files", None)
    if isinstance(files, FolderFiles) and len(files.names) >= MANY_FILES:
        yield (
            f"{len(files.names):,} files are opened one by one: pack them, which also saves inodes:"
            f" paceline pack {files.folder} packed/"
        )
    for stage, advice in (
        ("decode", "decode smaller images, or use more workers, which divide it"),
        (
            "collate",
            "define batch_of(indices) in the dataset, which reads whole batches",
        ),
    ):
        if stage in stages and float(stages[stage]["share"] or 0) > MIN_SHARE:
            yield f"{stage} takes {float(stages[stage]['share'] or 0):.0%} of the time of a sample: {advice}"
    order = next((row for row in rows if row["what"] == "order"), None)
    correlation = order.get("label_correlation") if order is not None else None
    if order is not None and isinstance(correlation, float) and correlation > MAX_CORRELATION:
        yield (
            f"neighbors in the order have related labels (correlation {correlation:.2f}): use"
            " --set data.shuffle=full, or a larger data.window"
        )


def check_workers(rows: Sequence[Row], cores: int = os.cpu_count() or 1) -> str | None:
    """Return how many workers would keep up with the step, if reading limits it; None if it does not."""
    step = next((row for row in rows if row["what"] == "step"), None)
    alone = next((row for row in rows if row["what"] == "read" and row.get("workers") == 1), None)
    if step is None or alone is None:
        return None
    needed = -(-float(step["per_s"] or 0) // max(1e-9, float(alone["per_s"] or 0)))
    if needed <= 1 or any(row.get("workers") == needed for row in rows):
        return None
    fits = "" if needed <= cores else f", more than the {cores} cores of this machine"
    return f"the step would need about {needed:,.0f} workers{fits}"

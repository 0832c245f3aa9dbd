"""Open the caches of a training on a rank, fill them, and report what they have."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.limits import free_memory_bytes
from paceline.data.cache.dataset import CachedDataset
from paceline.data.cache.folder import CacheFolder, choose_cache_folder
from paceline.data.cache.raw import find_raw
from paceline.data.cache.staging import Staging
from paceline.data.cache.store import SampleStore
from paceline.data.open_samples import find_streams
from paceline.data.samples import Samples
from paceline.distributed.world import World
from paceline.errors import DataError
from paceline.spec import Loading
from paceline.units import format_bytes

FREE_SHARE = 0.5  # of the free space, which a cache may use


@dataclass
class Caches:
    """The open caches of a rank, by split, and the processes that fill them."""

    datasets: dict[str, CachedDataset] = field(default_factory=dict)
    staging: list[Staging] = field(default_factory=list)

    def describe(self) -> Iterator[str]:
        """Yield a sentence for each split: what is stored, where, and why not more."""
        for split, dataset in self.datasets.items():
            usage = dataset.store.usage()
            what = "files" if dataset.raw is not None else "decoded samples"
            full = f"; no more are stored: {usage.full}" if usage.full else ""
            yield (
                f"cache of {split!r}: {usage.stored:,} of {usage.samples:,} {what} in at"
                f" most {format_bytes(usage.used_bytes)} of {dataset.store.folder.path.parent}{full}"
            )

    def close(self) -> None:
        """End the processes, and remove the caches that nobody else uses."""
        for staging in self.staging:
            staging.close()
        for dataset in self.datasets.values():
            dataset.store.close()


@contextlib.contextmanager
def open_caches(
    splits: list[Samples], loading: Loading, world: World, job: str, processes: int
) -> Iterator[Caches]:
    """Let samples be read through caches, in this context. Raises DataError if they cannot be cached.

    job: the same for the ranks of one start only; they share a cache. Jobs share the caches of datasets
    that identify their bytes. processes: that read samples, for each rank.
    """
    caches = Caches()
    if loading.cache == "off":
        yield caches
        return
    try:
        for samples in splits:
            if samples.split != "train" and find_reason_against(samples):
                continue
            dataset = caches.datasets[samples.split] = _open(samples, loading, world, job)
            samples.source = dataset
            if loading.stage != "off":
                caches.staging.append(Staging(dataset, world.local_rank, world.local_size, max(1, processes)))
        for staging in caches.staging:
            if loading.stage == "before":
                staging.start(niceness=0)
                staging.wait()
            else:
                staging.start()
        yield caches
    finally:
        for samples in splits:
            samples.source = samples.dataset
        caches.close()


def find_reason_against(samples: Samples) -> str | None:
    """Return why samples cannot be cached; None if they can."""
    if hasattr(samples.dataset, "batch_of"):
        return "has batch_of(indices), which reads whole batches"
    if find_streams(samples.dataset):
        return "is a Stream, which is read one sample after another"
    return None


def _open(samples: Samples, loading: Loading, world: World, job: str) -> CachedDataset:
    if why := find_reason_against(samples):
        raise DataError(f"dataset({samples.split!r}) cannot be cached: it {why}; use data.cache=off")
    raw = find_raw(samples.dataset) if loading.cache_content != "decoded" else None
    if raw is None and loading.cache_content == "raw":
        raise DataError(
            f"data.cache_content='raw' requires a Folder, Shards or Tokens, got"
            f" {type(samples.dataset).__name__}; use 'decoded', which caches what [i] returns"
        )
    fingerprint = raw.fingerprint() if raw is not None else None
    identity = repr((fingerprint or (job, samples.split, raw is None), samples.count))
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder = CacheFolder(choose_cache_folder(loading.cache == "memory", loading.cache_folder), name)
    try:
        if world.local_rank == 0:
            folder.remove_abandoned()
            folder.start_janitor()
        store = SampleStore(folder, samples.count, choose_limit_bytes(folder.path, loading)[0])
    except BaseException:
        folder.close()
        raise
    return CachedDataset(samples.dataset, store, raw)


def choose_limit_bytes(place: Path, loading: Loading) -> tuple[int, int]:
    """Return the bytes that a cache in a folder may have, and those that are free.

    The limit is as requested, or half of what is free.
    """
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if loading.cache == "memory":
        free = min(free, free_memory_bytes())
    return round(loading.cache_gib * 2**30 if loading.cache_gib is not None else FREE_SHARE * free), free

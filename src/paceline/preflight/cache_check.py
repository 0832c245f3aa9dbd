"""Check of a cache of the samples: the space it needs, and from which epoch on it pays."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster import directories
from paceline.cluster.facts import Cluster, Disk, Fact
from paceline.cluster.machine import Directory
from paceline.errors import ClusterError, DataError
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.data.cache.sizes import SourceSize


def find_disk(cluster: Cluster, path: Path) -> Disk | None:
    """Return the innermost measured directory around a path; None if there is none."""
    disks = [disk for disk in cluster.disks if path.is_relative_to(Path(disk.path).absolute())]
    return max(disks, key=lambda disk: len(disk.path), default=None)


@dataclass(frozen=True)
class CacheSize:
    """What a cache of the training samples will have on each node.

    place           the folder in which it is
    bytes           of all samples
    files           at most
    limit_bytes     which it may not exceed
    free_bytes      of the place
    content_bytes   of all samples, without what the cache stores besides
    """

    place: Path
    bytes: int
    files: int
    limit_bytes: int
    free_bytes: int
    content_bytes: int


def estimate_cache(context: PreflightContext) -> CacheSize | None:
    """Return the size of the cache; None if the request has none. Raises DataError if it is impossible."""
    loading = context.spec.data
    if loading.cache == "off":
        return None
    from paceline.data.cache.folder import choose_cache_folder
    from paceline.data.cache.opening import choose_limit_bytes, find_reason_against
    from paceline.data.cache.sizes import estimate_cached_bytes
    from paceline.data.cache.store import ROW, UNITS

    training = context.data.training
    if why := find_reason_against(training):
        raise DataError(f"the training samples cannot be cached: their dataset {why}; use data.cache=off")
    place = choose_cache_folder(loading.cache == "memory", loading.cache_folder)
    content_bytes = estimate_cached_bytes(training.dataset, loading.cache_content == "decoded")
    limit, free = choose_limit_bytes(place, loading)
    needed = content_bytes + ROW.size * training.count
    return CacheSize(place, needed, UNITS + 3, limit, free, content_bytes)


def check_cache(context: PreflightContext) -> Results:
    """Predict room, files and time of a cache of the training samples, from which epoch on it pays."""
    loading, cache = context.spec.data, estimate_cache(context)
    if cache is None:
        yield "passes", "data.cache=off: samples are read from their source"
        return
    place, limit = cache.place, cache.limit_bytes
    usage = f"{format_bytes(cache.bytes)} in at most {cache.files} files of {place} on each node"
    if limit > cache.free_bytes:
        yield (
            "warns",
            f"data.cache_gib={loading.cache_gib:g} is more than the {format_bytes(cache.free_bytes)} free in"
            f" {place}; use less, or another data.cache_folder",
        )
    if quotas := _find_exceeded_quotas(cache):
        yield (
            "warns",
            f"the samples need {usage}, but it has {' and '.join(quotas)}; use a smaller data.cache_gib, or"
            " another data.cache_folder",
        )
    elif cache.bytes > limit:
        yield (
            "warns",
            f"the samples need {usage}, but the limit is {format_bytes(limit)}: {limit / cache.bytes:.0%} of"
            " them will be cached; use a larger data.cache_gib, or another data.cache",
        )
    else:
        yield "passes", f"the samples need {usage}, of {format_bytes(limit)} at most"
    yield from _predict_payback(context, place, cache.content_bytes)


def _find_exceeded_quotas(cache: CacheSize) -> list[str]:
    """Return what a quota leaves in the place of a cache, if that is too little."""
    with contextlib.suppress(ClusterError):  # the check of room reports that quotas are not known
        quotas = directories.read_quotas()
        directory = directories.examine(cache.place, (), quotas, directories.list_mounts())
        limited = Directory(path=directory.path, quota=directory.quota)
        return [*directories.find_shortages(limited, min(cache.bytes, cache.limit_bytes), cache.files)]
    return []


def _predict_payback(context: PreflightContext, place: Path, cached_bytes: int) -> Results:
    """Compare the times of an epoch with and without the cache."""
    from paceline.data.cache.sizes import SourceSize, find_source_sizes

    data = context.data
    sources = [*find_source_sizes(data.training.dataset)]
    if not sources:
        yield "passes", "time is not predicted: only those of Folder, Shards and Tokens have known files"
        return
    found = [(source, find_disk(context.cluster, source.folder.absolute())) for source in sources]
    target = find_disk(context.cluster, place.absolute())
    is_memory = context.spec.data.cache == "memory"
    unknown = [str(source.folder) for source, disk in found if disk is None or not _rates(disk)]
    unknown += (
        [] if is_memory or (target is not None and target.write_Bps and _rates(target)) else [str(place)]
    )
    if unknown:
        yield (
            "warns",
            f"time is not predicted, because the disk of {unknown[0]} was not measured; run paceline bench"
            f" --directory {unknown[0]}, which writes cluster.json",
        )
        return
    epoch = CacheTimes(
        source_s=sum(_read_s(source, disk) for source, disk in found if disk is not None),
        stage_s=sum(_stage_s(source, disk) for source, disk in found if disk is not None)
        + (0.0 if target is None or target.write_Bps is None else cached_bytes / target.write_Bps.value),
        cached_s=0.0
        if target is None
        else _read_s(SourceSize(place, cached_bytes, data.training.count, 1, False), target),
        nodes=context.launch.nodes,
    )
    epochs = context.spec.total_steps(data.samples) * context.spec.batch / data.samples
    yield from epoch.judge(epochs)


@dataclass(frozen=True)
class CacheTimes:
    """Seconds of one reader for all samples once: at the source, staged in order, and from the cache.

    nodes: that share the samples of an epoch; each stages all of them.
    """

    source_s: float
    stage_s: float
    cached_s: float
    nodes: int

    @property
    def first_epoch(self) -> int | None:
        """The epoch at whose end staging has saved time; None: never."""
        gain_s = (self.source_s - self.cached_s) / self.nodes
        return math.floor(self.stage_s / gain_s) + 1 if gain_s > 0 else None

    def judge(self, epochs: float) -> Results:
        """Compare with the epochs of the training."""
        times = (
            f"one reader takes {format_seconds(self.source_s / self.nodes)} for an epoch from the source,"
            f" {format_seconds(self.cached_s / self.nodes)} from the cache, and"
            f" {format_seconds(self.stage_s)} to stage it"
        )
        first = self.first_epoch
        if first is None:
            yield "warns", f"{times}: the cache is not faster; use data.cache=off"
        elif first > math.ceil(epochs):
            yield "warns", f"{times}: it pays from epoch {first} on, but the training has {epochs:.3g}"
        else:
            yield "passes", f"{times}: it pays from epoch {first} on, of {epochs:.3g}"


def _rates(disk: Disk) -> tuple[Fact, Fact] | None:
    if disk.read_Bps is None or disk.random_reads_per_s is None:
        return None
    return disk.read_Bps, disk.random_reads_per_s


def _read_s(source: SourceSize, disk: Disk) -> float:
    """Return the seconds to read all samples at random."""
    rates = _rates(disk)
    assert rates is not None
    sequential, random = rates
    opens_s = source.samples / disk.opens_per_s.value if source.is_loose and disk.opens_per_s else 0.0
    return opens_s + source.samples / random.value + source.bytes / sequential.value


def _stage_s(source: SourceSize, disk: Disk) -> float:
    """Return the seconds to read samples in the order of the dataset: loose files are still at random."""
    rates = _rates(disk)
    assert rates is not None
    return _read_s(source, disk) if source.is_loose else source.bytes / rates[0].value

"""Bandwidth and latency of caches and memory, from a single thread.

Bandwidth is that of a copy. The time of a call is the same for small and large arrays, so it cancels in the
difference of two sizes. Latency is the time of a chain of accesses to random places, each of which gives the
place of the next, minus the time of the same chain in the nearest cache.
"""

import functools
import gc
import itertools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
ROUNDS = 7  # of each measurement; the fastest counts, since other programs only slow it down
FACTOR = 8  # largest part of a cache that is used, relative to the cache below it
MIN_ROUNDS, ENOUGH_S = 3, 0.5  # fewer rounds, if they have taken this long
MIN_ROUND_S = 0.002
LINK_BYTES = 64  # of a link of a chain in memory: 48 bytes, spread over lines of 64 bytes
MAX_LINKS = 3_000_000
NEAR_LINKS = 32  # of the chain whose time is subtracted
STEPS = 50_000  # along a chain


@dataclass(frozen=True)
class MemoryLevel:
    """A cache or the memory, and the bytes that are used to measure it."""

    name: str
    size_bytes: int  # 0: unknown, of the memory
    used_bytes: int


def list_levels(caches: Path = CACHES) -> list[MemoryLevel]:
    """Return the data caches of the first core, as the system reports them, and the memory."""
    found: dict[int, int] = {}
    for folder in sorted(caches.glob("index*")):
        try:
            kind, level, size = ((folder / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        match = re.fullmatch(r"(\d+)([KMG])", size)
        if kind in ("Data", "Unified") and level.isdigit() and match is not None:
            found[int(level)] = int(match[1]) * UNITS[match[2]]
    levels, below = [], 2**62
    for number, size_bytes in sorted(found.items()):
        # a virtual machine reports the whole of a cache that it shares with others
        levels.append(MemoryLevel(f"L{number} cache", size_bytes, min(size_bytes // 2, below)))
        below = FACTOR * size_bytes
    largest = max(found.values(), default=2**25)
    affordable = int(psutil.virtual_memory().available // 8)
    return [*levels, MemoryLevel("memory", 0, min(max(4 * largest, 2**28), affordable))]


def measure_copy_Bps(level: MemoryLevel) -> float | None:
    """Return the bytes that a copy within a level reads and writes per second; None if it is too fast."""
    times_s, small = {}, level.used_bytes // 3
    for size in (small, level.used_bytes):
        source = np.ones(size // 16)  # source and target together have this size
        target = np.empty_like(source)
        times_s[size] = _measure_fastest(source, target)
    difference_s = times_s[level.used_bytes] - times_s[small]
    return (level.used_bytes - small) / difference_s if difference_s > 0 else None


def _measure_fastest(source: "np.ndarray", target: "np.ndarray") -> float:
    """Return the seconds of a copy: the fastest of several rounds of many copies."""
    np.copyto(target, source)
    began = time.perf_counter()
    np.copyto(target, source)
    fastest = spent_s = max(time.perf_counter() - began, 1e-7)  # the first round, of one copy
    count = max(1, int(MIN_ROUND_S / fastest))
    for done in range(1, ROUNDS):
        if done >= MIN_ROUNDS and spent_s > ENOUGH_S:
            break
        began = time.perf_counter()
        for _ in itertools.repeat(None, count):
            np.copyto(target, source)
        round_s = time.perf_counter() - began
        fastest, spent_s = min(fastest, round_s / count), spent_s + round_s
    return fastest


class ChainItem:
    """A place in memory that names the next place."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next: ChainItem | None = None


@contextmanager
def build_chain(count: int, seed: int = 0) -> Iterator[ChainItem]:
    """Yield the first of `count` links in a ring, in random order of their addresses."""
    had_gc = gc.isenabled()
    gc.disable()  # it would visit all links again and again
    links = [ChainItem() for _ in range(count)]
    order = np.random.default_rng(seed).permutation(count).tolist()
    try:
        for at, following in zip(order, [*order[1:], order[0]], strict=True):
            links[at].next = links[following]
        yield links[0]
    finally:
        for link in links:  # a ring would be freed only by the collector
            link.next = None
        if had_gc:
            gc.enable()


def measure_access_s(used_bytes: int) -> float:
    """Return the seconds of an access along a chain that takes `used_bytes`."""
    count = max(NEAR_LINKS, min(used_bytes // LINK_BYTES, MAX_LINKS))
    with build_chain(count) as link:
        fastest = float("inf")
        for _ in range(ROUNDS):
            began = time.perf_counter()
            # a loop in C: getattr(link, "next"), and so on from its result
            link = functools.reduce(getattr, itertools.repeat("next", STEPS), link)
            fastest = min(fastest, (time.perf_counter() - began) / STEPS)
    return fastest


def holds_chain(level: MemoryLevel) -> bool:
    """Return whether a chain can be as large as the measurement of this level requires."""
    return level.used_bytes // LINK_BYTES <= MAX_LINKS


def measure_latency_s(level: MemoryLevel) -> float:
    """Return how much longer an access to a level takes than one to the nearest cache."""
    return max(0.0, measure_access_s(level.used_bytes) - measure_access_s(NEAR_LINKS * LINK_BYTES))

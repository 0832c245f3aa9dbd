"""Paces: seconds of one operation on a CPU, by its kind and size. There each one is started when the one before is done."""

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

BACKWARD = " backward"
# What sizes count: multiplications of products and attention; parameters of an update; else elements that are read and written.
KINDS = (
    "linear",
    "convolution",
    "attention",
    "move",
    "function",
    "norm",
    "pool",
    "gather",
    "draw",
    "view",
    "update",
)


@dataclass(frozen=True, eq=False)
class OpTimeTable:
    """Of one rank. tables: of a kind (size, seconds), the smaller first; between two sizes both scales are logarithmic."""

    tables: Mapping[str, tuple[tuple[float, float], ...]]
    measured: bool = True
    _cache: dict[tuple[str, float], float] = field(default_factory=dict)

    def seconds(self, kind: str, size: float) -> float:
        """Of one operation; below the smallest size as long as that, above the largest in proportion. A kind of which nothing is known
        takes no time backward, as random numbers do."""
        key = kind, size
        if key not in self._cache:
            self._cache[key] = _interpolate(self.tables[kind], size) if kind in self.tables else 0.0
        return self._cache[key]


def _interpolate(table: tuple[tuple[float, float], ...], size: float) -> float:
    at = bisect(table, (size, math.inf))
    if at == 0:
        return table[0][1]
    if at == len(table):
        largest, seconds = table[-1]
        return seconds * size / largest
    (low, quick), (high, slow) = table[at - 1], table[at]
    share = math.log(size / low) / math.log(high / low)
    return quick ** (1 - share) * slow**share


def blend(few: OpTimeTable, many: OpTimeTable, share: float) -> OpTimeTable:
    """Between those with few threads and those with many, on logarithmic scales."""
    tables = {}
    for kind, table in few.tables.items():
        tables[kind] = tuple(
            (size, seconds ** (1 - share) * many.seconds(kind, size) ** share) for size, seconds in table
        )
    return OpTimeTable(tables, few.measured and many.measured)


LARGE_SIZE = 2.0**24


@lru_cache(64)
def guess_op_times(flops: float, memory_Bps: float, start_s: float) -> OpTimeTable:
    """Of the right order of magnitude, from what the products and the memory of a rank reach, and what it takes to start an operation."""
    per_s = {
        "linear": flops / 2,
        "convolution": flops / 4,
        "attention": flops / 6,
        "move": memory_Bps / 4,
        "norm": memory_Bps / 6,
    }
    per_s |= {
        "function": memory_Bps / 10,
        "pool": memory_Bps / 16,
        "gather": memory_Bps / 8,
        "draw": memory_Bps / 40,
    }
    per_s |= {"update": memory_Bps / 32}
    tables: dict[str, tuple[tuple[float, float], ...]] = {
        "view": ((1.0, start_s / 4), (LARGE_SIZE, start_s / 4)),
        "view" + BACKWARD: ((1.0, start_s / 4), (LARGE_SIZE, start_s / 4)),
    }
    for kind, rate in per_s.items():
        for name, times in ((kind, 1.0), (kind + BACKWARD, 2.0)):
            if name not in ("draw" + BACKWARD, "update" + BACKWARD):
                sizes = (1.0, rate * start_s, LARGE_SIZE * 2**10)
                tables[name] = tuple((size, times * max(start_s, size / rate)) for size in sorted(sizes))
    return OpTimeTable(tables, measured=False)

"""OpTimeTable: seconds of one operation on a CPU, by kind and size.

A CPU starts each when the previous ends.
"""

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

BACKWARD = " backward"
MAX_SLOWDOWN = 1.6  # of operations in a step, relative to operations alone
STEP = "step"  # of a training: its size is the sum of the seconds of its operations, measured alone
# Sizes count multiplications of products and attention, parameters of an update, and else elements read and
# written.
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
    """Operation times of one rank.

    tables: by kind, (size, seconds) in ascending order; interpolation is linear on logarithmic scales.
    """

    tables: Mapping[str, tuple[tuple[float, float], ...]]
    measured: bool = True
    _cache: dict[tuple[str, float], float] = field(default_factory=dict)

    def slowed(self, factor: float) -> "OpTimeTable":
        """Return the times multiplied by `factor`, without those of steps."""
        tables = {
            kind: tuple((size, seconds * factor) for size, seconds in table)
            for kind, table in self.tables.items()
            if kind != STEP
        }
        return OpTimeTable(tables, self.measured)

    def seconds(self, kind: str, size: float) -> float:
        """Return the seconds of one operation of `kind` and `size`.

        Below the smallest size, the time of that size; above the largest, proportional to the size. An
        unknown kind takes no time, such as the backward pass of random numbers.
        """
        key = kind, size
        if key not in self._cache:
            self._cache[key] = _interpolate(self.tables[kind], size) if kind in self.tables else 0.0
        return self._cache[key]


def in_steps(measured: OpTimeTable) -> OpTimeTable:
    """Return the times of operations in a training step, if steps were measured too.

    All operations get the mean factor of the steps: what delays them does not depend on their kind. A large
    factor would come from other programs on the machine.
    """
    steps = measured.tables.get(STEP, ())
    ratios = [math.log(seconds / alone_s) for alone_s, seconds in steps]
    slowdown = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    return measured.slowed(min(MAX_SLOWDOWN, max(1.0, slowdown)))


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
    """Return times between those of few and of many threads, interpolated on logarithmic scales."""
    tables = {}
    for kind, table in few.tables.items():
        tables[kind] = tuple(
            (size, seconds ** (1 - share) * many.seconds(kind, size) ** share) for size, seconds in table
        )
    return OpTimeTable(tables, few.measured and many.measured)


LARGE_SIZE = 2.0**24


@lru_cache(64)
def guess_op_times(flops: float, memory_Bps: float, start_s: float) -> OpTimeTable:
    """Return times of the right order of magnitude, from rates and the start of an operation."""
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

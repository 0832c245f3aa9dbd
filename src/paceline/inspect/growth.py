"""Memory that grows steadily: the medians of parts of a time rise, and do not level off."""

import itertools
from typing import NamedTuple

from paceline.inspect.windows import block_medians

BLOCKS = 10  # parts of the time after the warm-up at most, whose medians are compared
WARM_UP_SHARE = 0.2  # of the samples: allocators and caches fill


class GrowthLimits(NamedTuple):
    """When memory counts as growing.

    MiB, share  least growth, also as a share of the memory at the beginning
    late        least growth of the second half, relative to the first: caches level off
    falling     differences between the parts that may be negative or zero
    """

    MiB: float
    share: float
    late: float
    falling: int


class Growth(NamedTuple):
    """The memory of a rank, of its workers or of a GPU at the beginning and at the end of a time."""

    number: int
    first_MiB: float
    last_MiB: float
    seconds: float

    @property
    def MiB_per_s(self) -> float:
        return (self.last_MiB - self.first_MiB) / self.seconds


def find_growth(number: int, series: list[tuple[float, float]], limits: GrowthLimits) -> Growth | None:
    """Return the growth of a series of times and MiB; None if it does not grow steadily."""
    series = series[round(WARM_UP_SHARE * len(series)) :]
    blocks = min(BLOCKS, len(series))
    medians = block_medians([value for _, value in series], blocks)
    rises = [after - before for before, after in itertools.pairwise(medians)]
    growth, half = medians[-1] - medians[0], medians[blocks // 2] - medians[0]
    if (
        sum(rise <= 0 for rise in rises) > limits.falling
        or growth < max(limits.MiB, limits.share * medians[0])
        or medians[-1] - medians[blocks // 2] < limits.late * half
    ):
        return None
    duration_s = max(series[-1][0] - series[0][0], 1e-3) * (blocks - 1) / blocks
    return Growth(number, medians[0], medians[-1], duration_s)

"""Every plan that could exist for a number of ranks."""

from collections.abc import Iterator
from itertools import product

from paceline.plan.plan import Plan
from paceline.plan.schedules import RUNNABLE_SCHEDULES


def enumerate_candidates(ranks: int) -> Iterator[Plan]:
    """Yield plans of one axis first, then mixtures.

    They are not checked against a model, a batch or this version.
    """
    for microbatches in (None, 2):
        yield from _data_parallel_plans(ranks, microbatches)
    if ranks == 1:
        return
    for microbatches in (None, 2):
        yield Plan(tp=ranks, microbatches=microbatches)
    for microbatches in (None, 2):
        yield Plan(cp=ranks, microbatches=microbatches)
    for schedule in RUNNABLE_SCHEDULES:
        yield Plan(pp=ranks, pp_schedule=schedule)
    for dp, cp, tp, pp in _mixed_degrees(ranks):
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            yield Plan(dp=dp if dp > 1 else None, cp=cp, tp=tp, pp=pp, zero=zero)


def _data_parallel_plans(ranks: int, microbatches: int | None) -> Iterator[Plan]:
    yield Plan(dp=1 if ranks == 1 else None, microbatches=microbatches)
    for zero in (1, 2, 3):
        yield Plan(zero=zero, microbatches=microbatches)
    if ranks % 2 == 0:
        yield Plan(zero=3, replicate=2, microbatches=microbatches)


def _mixed_degrees(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield degrees of dp, cp, tp, pp that multiply to `ranks`, at least two of them above 1."""
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for degrees in product(divisors, repeat=4):
        dp, cp, tp, pp = degrees
        if dp * cp * tp * pp == ranks and sum(degree > 1 for degree in degrees) > 1:
            yield dp, cp, tp, pp

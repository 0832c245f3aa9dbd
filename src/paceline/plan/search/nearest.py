"""A plan for other ranks than it was made for: the same where that can be, else those that are most like it."""

import math
from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import PlanError
from paceline.plan.plan import Plan, micro_batch_size
from paceline.plan.search.candidates import enumerate_candidates


def find_nearest_plans(
    plan: Plan, before: int, ranks: int, batch: int, may_cut: bool = True
) -> Iterator[Plan]:
    """Plans for `ranks` in place of `plan` on `before`, the most like it first, which split the same global batch. A rank's micro-batch
    does not grow, for it may not fit: more of them are added up instead, unless they may not be cut (`may_cut`: BatchNorm would see it).

    Raises PlanError where `plan` was none for `before` ranks and this batch."""
    was = plan.resolve(before)
    most = micro_batch_size(batch, was)
    if (
        was.is_asynchronous and ranks > 1
    ):  # what it trains depends on its ranks; another plan would train something else
        plan.resolve(ranks)
        yield plan
        return
    alike = [Plan(dp=1, microbatches=was.microbatches, recompute=plan.recompute)]
    if ranks > 1:
        same = replace(plan, dp=None, microbatches=was.microbatches)
        alike = [
            same,
            replace(same, replicate=1),
            *(_with_options_of(plan, other) for other in enumerate_candidates(ranks)),
        ]
    found: set[Plan] = set()
    for other in sorted(alike, key=lambda other: _distance(was, other, ranks)):
        for uneven in (0, 1):
            try:
                split = _fit_batch(replace(other, uneven=uneven), ranks, batch, most if may_cut else None)
            except PlanError:
                continue
            if split is not None and split.resolve(ranks) not in found:
                found.add(split.resolve(ranks))
                yield split


def _with_options_of(plan: Plan, other: Plan) -> Plan:
    """`other` with what it has of `plan` besides the degrees."""
    pipeline = (
        {"pp_schedule": plan.pp_schedule, "stages": plan.stages}
        if other.pp > 1 and plan.pp > 1
        else {"pp_schedule": None, "stages": None}
    )
    return replace(other, microbatches=plan.microbatches, recompute=plan.recompute, **pipeline)


def _distance(was: Plan, other: Plan, ranks: int) -> tuple[float, ...]:
    """A cut of the model that is new comes last: it may be wrong for this model. Then one that is given up, which takes memory unless
    ZeRO makes up for it."""
    axes = [(getattr(was, axis), getattr(other, axis)) for axis in ("tp", "pp", "cp")]
    new = sum(now > then == 1 for then, now in axes)
    gone = sum(then > now == 1 for then, now in axes)
    wanted = 3 if gone and was.tp * was.pp > 1 and ranks > 1 else was.zero
    degrees = sum(abs(math.log2(now / then)) for then, now in axes)
    return new, gone, abs(wanted - other.zero), degrees, abs(was.replicate - other.replicate)


def _fit_batch(plan: Plan, ranks: int, batch: int, most: int | None) -> Plan | None:
    """With as few more micro-batches as keep one at `most` samples; None where that cannot be. Raises PlanError where the plan cannot."""
    on = plan.resolve(ranks)
    if plan.uneven and batch % (on.dp * on.microbatches) == 0:
        return None  # needs not be
    for microbatches in [on.microbatches] if most is None else range(on.microbatches, batch // on.dp + 1):
        if batch % (microbatches if plan.uneven else microbatches * on.dp) or (
            most is not None and -(-batch // (microbatches * on.dp)) > most
        ):
            continue
        cut = replace(
            plan,
            microbatches=microbatches if microbatches != plan.default_microbatches else None,
        )
        cut.resolve(ranks)
        micro_batch_size(batch, cut.resolve(ranks))
        return cut
    return None

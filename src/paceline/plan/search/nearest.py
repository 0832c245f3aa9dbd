"""Plans for another number of ranks: the same plan if possible, else the most similar ones."""

import math
from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import PlanError
from paceline.plan.plan import Plan, micro_batch_size
from paceline.plan.search.candidates import enumerate_candidates


def find_nearest_plans(
    plan: Plan, before: int, ranks: int, batch: int, may_cut: bool = True
) -> Iterator[Plan]:
    """Yield plans for `ranks` ranks in place of `plan` on `before` ranks, most similar first.

    They have the same global batch.

    The micro-batch of a rank does not grow, because it may not fit into memory: the number of micro-batches
    grows instead, unless `may_cut` is False (BatchNorm depends on the size of micro-batches).

    Raises PlanError if `plan` does not fit `before` ranks and this batch.
    """
    old = plan.resolve(before)
    max_samples = micro_batch_size(batch, old)
    if old.is_asynchronous and ranks > 1:
        # Its result depends on the number of ranks; another plan would train something else.
        plan.resolve(ranks)
        yield plan
        return
    plans = [Plan(dp=1, microbatches=old.microbatches, recompute=plan.recompute)]
    if ranks > 1:
        same = replace(plan, dp=None, microbatches=old.microbatches)
        plans = [
            same,
            replace(same, replicate=1),
            *(_with_options_of(plan, other) for other in enumerate_candidates(ranks)),
        ]
    seen: set[Plan] = set()
    for candidate in sorted(plans, key=lambda other: _distance(old, other, ranks)):
        for uneven in (0, 1):
            try:
                fitted = _fit_batch(
                    replace(candidate, uneven=uneven), ranks, batch, max_samples if may_cut else None
                )
            except PlanError:
                continue
            if fitted is not None and fitted.resolve(ranks) not in seen:
                seen.add(fitted.resolve(ranks))
                yield fitted


def _with_options_of(plan: Plan, other: Plan) -> Plan:
    """Return `other` with all options of `plan` except the degrees."""
    pipeline = (
        {"pp_schedule": plan.pp_schedule, "stages": plan.stages}
        if other.pp > 1 and plan.pp > 1
        else {"pp_schedule": None, "stages": None}
    )
    return replace(other, microbatches=plan.microbatches, recompute=plan.recompute, **pipeline)


def _distance(old: Plan, other: Plan, ranks: int) -> tuple[float, ...]:
    """Return the sort key of `other`: how different it is from `old`.

    A plan that splits the model on a new axis comes last: the model may not allow it. Before it come plans
    that give up an axis, which takes memory unless ZeRO saves it elsewhere.
    """
    axes = [(getattr(old, axis), getattr(other, axis)) for axis in ("tp", "pp", "cp")]
    new = sum(now > then == 1 for then, now in axes)
    gone = sum(then > now == 1 for then, now in axes)
    wanted = 3 if gone and old.tp * old.pp > 1 and ranks > 1 else old.zero
    degrees = sum(abs(math.log2(now / then)) for then, now in axes)
    return new, gone, abs(wanted - other.zero), degrees, abs(old.replicate - other.replicate)


def _fit_batch(plan: Plan, ranks: int, batch: int, max_samples: int | None) -> Plan | None:
    """Return `plan` with the fewest micro-batches of at most `max_samples` samples, or None.

    Raises PlanError if the plan does not fit `ranks`.
    """
    resolved = plan.resolve(ranks)
    if plan.uneven and batch % (resolved.dp * resolved.microbatches) == 0:
        return None  # an even split is possible
    for microbatches in (
        [resolved.microbatches]
        if max_samples is None
        else range(resolved.microbatches, batch // resolved.dp + 1)
    ):
        if batch % (microbatches if plan.uneven else microbatches * resolved.dp) or (
            max_samples is not None and -(-batch // (microbatches * resolved.dp)) > max_samples
        ):
            continue
        is_default = microbatches == plan.default_microbatches
        fitted = replace(plan, microbatches=None if is_default else microbatches)
        micro_batch_size(batch, fitted.resolve(ranks))
        return fitted
    return None

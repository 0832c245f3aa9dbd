"""Rank plans whose steps were measured before those that are only predicted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from paceline.plan.cost_model.cost import Cost
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans


@dataclass(frozen=True)
class MeasuredStep:
    """The measured time of a step under a plan, its relative standard error, and the predicted cost."""

    plan: Plan
    predicted: Cost
    step_s: float
    error: float

    @property
    def cost(self) -> Cost:
        """The predicted cost with the measured time."""
        return replace(self.predicted, time=self.predicted.time.scaled_to(self.step_s, self.error))


def rank_measured(
    found: BestPlans, measured: Sequence[MeasuredStep], failed: Collection[Plan] = ()
) -> BestPlans:
    """Return the plans with the measured ones first, by their measured times, then the others as before.

    failed: plans that did not train; they are left out.
    """
    named = {plan.resolve(found.ranks): plan for plan, _ in found.plans}
    steps = {each.plan.resolve(found.ranks): each for each in measured}
    left_out = steps.keys() | {plan.resolve(found.ranks) for plan in failed}
    first = [
        (named.get(resolved, each.plan), each.cost)
        for resolved, each in sorted(steps.items(), key=lambda pair: pair[1].step_s)
    ]
    others = [(plan, cost) for plan, cost in found.plans if plan.resolve(found.ranks) not in left_out]
    return replace(found, plans=[*first, *others])


def count_maybe_faster(found: BestPlans) -> int:
    """Return how many plans without a measurement may be faster than the first, a measured one.

    Their predictions overlap with it within one standard deviation of both.
    """
    best = found.plans[0][1]
    longest_s = best.step_s * (1 + best.time.error_of_plan)
    return sum(
        cost.step_s * (1 - cost.time.error_of_plan) < longest_s
        for _, cost in found.plans
        if not cost.time.is_measured
    )

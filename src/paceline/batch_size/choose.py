"""The batch, ranks and plan with the least predicted time, energy or price to the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.batch_size.convergence import ConvergenceCurve, Interval
from paceline.batch_size.result import BatchResult
from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.cost import CURRENCY, Bill
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.model.facts import ModelFacts
from paceline.plan.search.best_plans import bill_training, find_best_plans


@dataclass(frozen=True)
class Choice:
    """A way to reach the target. seconds: with limits that follow from those of steps and of a step."""

    batch: int
    ranks: int
    plan: str
    step_s: float
    steps: Interval
    seconds: Interval
    bill: Bill


def find_candidates(results: Sequence[BatchResult]) -> list[int]:
    """Return the batches that reached the target, and twice the largest batch if that did."""
    batches = [result.batch for result in results if result.steps is not None]
    if batches and batches[-1] == results[-1].batch:
        batches.append(2 * batches[-1])
    return batches


def list_choices(
    curve: ConvergenceCurve,
    facts: ModelFacts,
    recipe: Recipe | None,
    cluster: Cluster,
    batches: Sequence[int],
    ranks: Sequence[int],
    plan: str | None,
    price: float | None,
    currency: str = CURRENCY,
) -> list[Choice]:
    """Return the fastest plan for each batch and number of ranks, the shortest training first.

    plan: predict this plan alone. price: of a device's hour, in `currency`. Combinations that are not
    possible are left out.
    """
    found = [
        choice
        for batch in batches
        for count in ranks
        for choice in _choose(curve, facts, recipe, cluster, batch, count, plan, price, currency)
    ]
    return sorted(found, key=lambda choice: choice.seconds.value)


def _choose(
    curve: ConvergenceCurve,
    facts: ModelFacts,
    recipe: Recipe | None,
    cluster: Cluster,
    batch: int,
    ranks: int,
    plan: str | None,
    price: float | None,
    currency: str,
) -> Iterator[Choice]:
    try:
        best = find_best_plans(facts, cluster, batch, plan, recipe, ranks)
    except PlanError:  # the batch cannot be divided, or the model does not fit
        return
    chosen, cost = best.plans[0]
    samples = curve.predict(batch)
    steps = Interval(samples.value / batch, samples.low / batch, samples.high / batch)
    tokens = steps.value * cost.time.tokens
    bill = bill_training(best.cluster, cost, ranks, tokens, price, currency=currency)
    assert bill is not None
    relative = ((steps.high / steps.value - 1) ** 2 + cost.time.error**2) ** 0.5
    seconds = Interval(bill.seconds, bill.seconds / (1 + relative), bill.seconds * (1 + relative))
    yield Choice(batch, ranks, str(chosen), cost.step_s, steps, seconds, bill)


def pick_best(choices: Sequence[Choice]) -> dict[str, Choice]:
    """Return the best choice by time, energy and price; without energy and price if they are unknown.

    Of equal prices, the faster choice counts.
    """
    best: dict[str, Choice] = {}
    if not choices:
        return best
    best["time"] = min(choices, key=lambda choice: choice.seconds.value)
    if all(choice.bill.kWh is not None for choice in choices):
        best["energy"] = min(choices, key=lambda choice: (choice.bill.kWh or 0.0, choice.seconds.value))
    if all(choice.bill.price is not None for choice in choices):
        best["price"] = min(choices, key=lambda choice: (choice.bill.price or 0.0, choice.seconds.value))
    else:
        best["device hours"] = min(
            choices, key=lambda choice: (choice.bill.device_hours, choice.seconds.value)
        )
    return best

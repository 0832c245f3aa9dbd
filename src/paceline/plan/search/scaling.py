"""Scaling of a training: the fastest plan for each number of ranks.

Strong scaling has one batch for all ranks, weak scaling one batch per rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.cost import CURRENCY, Bill, Cost, CostPart
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.predict import default_recipe
from paceline.plan.cost_model.rates import DeviceRates, device_rates
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import bill_training
from paceline.plan.search.search import MARGIN, find_fastest, find_leanest, no_fit_error, search_plans

# Yields those of some plans that can train a task on a number of ranks with a batch.
TrainableFilter = Callable[[Iterable[tuple[Plan, Cost]], int, int], Iterator[tuple[Plan, Cost]]]


@dataclass(frozen=True)
class ScalingPoint:
    """The fastest plan that fits on `ranks` ranks.

    bill: of the whole training; None if its tokens are not specified.
    efficiency: samples per second and rank, relative to the fewest ranks of the curve.
    lost: the part whose device time per sample grew most since the fewest ranks, as a share of the device
    time here.
    """

    ranks: int
    nodes: int
    batch: int
    plan: Plan
    cost: Cost
    bill: Bill | None
    efficiency: float = 1.0
    lost: CostPart | None = None


@dataclass(frozen=True)
class InfeasibleCount:
    """Why no plan exists for `ranks` ranks.

    want: what is missing: memory, samples to split, or ranks to fill the nodes.
    """

    ranks: int
    want: Literal["memory", "samples", "nodes"]
    reason: str


@dataclass(frozen=True)
class Curve:
    """Points by number of ranks, fewest first."""

    points: tuple[ScalingPoint, ...]
    refused: tuple[InfeasibleCount, ...]


@dataclass(frozen=True)
class Scaling:
    """Curves of strong and weak scaling.

    strong: `batch` samples per step on any number of ranks.
    weak: `each` samples per rank, as on the fewest ranks of `strong`.
    tokens: of the whole training. assumed: sentences. memory_speedup: how many times as fast the fewest ranks
    of `strong` would be if their memory were unlimited.
    """

    facts: ModelFacts
    cluster: Cluster
    batch: int
    each: Fraction
    strong: Curve
    weak: Curve
    tokens: float | None
    assumed: tuple[str, ...]
    memory_speedup: float = 1.0


def predict_scaling(
    facts: ModelFacts,
    cluster: Cluster,
    counts: Sequence[int],
    batch: int,
    recipe: Recipe | None = None,
    tokens: float | None = None,
    price: float | None = None,
    trainable: TrainableFilter | None = None,
    currency: str = CURRENCY,
) -> Scaling:
    """Return the fastest plan for each number of ranks, on as many nodes as necessary.

    trainable: yields those of some plans that can train the task [default: all]. currency: of the price.
    Raises PlanError if no plan fits on any of `counts`.
    """
    most = max(-(-count // cluster.ranks_per_node) for count in counts)
    whole, assumed = add_assumptions(cluster.model_copy(update={"nodes": max(most, cluster.nodes)}))
    if most > cluster.nodes:
        many = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
        assumed = (
            f"{cluster.name or cluster.device.name} has {many}; the others of {most:,} are assumed to be "
            f"identical",
            *assumed,
        )
    inputs = _ScalingInputs(facts, whole, recipe, tokens, price, {}, trainable, currency)

    def curve(batches: dict[int, Fraction]) -> Curve:
        results = [_scaling_point(inputs, count, samples) for count, samples in batches.items()]
        points = [result for result in results if isinstance(result, ScalingPoint)]
        return Curve(
            points=tuple(_compare_with_first(points[0], point) for point in points),
            refused=tuple(result for result in results if isinstance(result, InfeasibleCount)),
        )

    strong = curve(dict.fromkeys(counts, Fraction(batch)))
    if not strong.points:
        raise _no_plan_error(inputs, batch, strong.refused)
    each = Fraction(batch, strong.points[0].ranks)
    weak = curve({count: each * count for count in counts})
    memory_speedup = _find_memory_speedup(inputs, strong.points[0])
    return Scaling(facts, whole, batch, each, strong, weak, tokens, assumed, memory_speedup)


def find_last_efficient(curve: Curve, efficiency: float) -> ScalingPoint:
    """Return the point with the most ranks whose efficiency is at least `efficiency`."""
    return next(
        point
        for point in reversed(curve.points)
        if point.efficiency >= efficiency or point is curve.points[0]
    )


class _ScalingInputs(NamedTuple):
    """What stays the same while ranks and batch change.

    `known`: rates by ranks per node, which searches on more nodes reuse.
    """

    facts: ModelFacts
    cluster: Cluster
    recipe: Recipe | None
    tokens: float | None
    price: float | None
    known: dict[int, DeviceRates]
    trainable: TrainableFilter | None
    currency: str


def _scaling_point(inputs: _ScalingInputs, ranks: int, samples: Fraction) -> ScalingPoint | InfeasibleCount:
    each, cluster = inputs.cluster.ranks_per_node, inputs.cluster
    if ranks > each and ranks % each:
        below = ranks // each * each
        return InfeasibleCount(
            ranks, "nodes", f"nodes of {each} would not be full; use {below:,} or {below + each:,}"
        )
    if samples.denominator > 1:
        return InfeasibleCount(
            ranks, "samples", f"a batch of {float(samples):g} is not a whole number of samples"
        )
    nodes, batch = -(-ranks // each), int(samples)
    if min(ranks, each) not in inputs.known:
        inputs.known[min(ranks, each)] = device_rates(
            cluster.model_copy(update={"nodes": nodes}), ranks=ranks
        )
    rates = inputs.known[min(ranks, each)]
    recipe = inputs.recipe or default_recipe(rates)
    found = find_fastest(inputs.facts, rates, ranks, batch, MARGIN, recipe)
    if found is not None and inputs.trainable is not None:
        found = _find_trainable(inputs.trainable, inputs, found, ranks, batch, nodes)
        if found is None:
            return InfeasibleCount(ranks, "samples", "train refuses all plans that fit")
    if found is not None:
        bill = bill_training(cluster, found[1], ranks, inputs.tokens, inputs.price, currency=inputs.currency)
        return ScalingPoint(ranks, nodes, batch, *found, bill)
    best = find_leanest(inputs.facts, rates, ranks, batch, MARGIN, recipe)
    if best is None:
        return InfeasibleCount(ranks, "samples", f"a batch of {batch:,} cannot be split over {ranks:,} ranks")
    return InfeasibleCount(ranks, "memory", f"the leanest plan, {best.plan}, {best.reason}")


def _find_memory_speedup(inputs: _ScalingInputs, point: ScalingPoint) -> float:
    """Return the time of the point's step relative to that of the fastest plan with unlimited memory."""
    rates = inputs.known[min(point.ranks, inputs.cluster.ranks_per_node)]
    recipe = inputs.recipe or default_recipe(rates)
    found = find_fastest(inputs.facts, rates, point.ranks, point.batch, -math.inf, recipe)
    if found is not None and inputs.trainable is not None:
        found = next(inputs.trainable([found], point.ranks, point.batch), None)
    return max(1.0, point.cost.step_s / found[1].step_s) if found is not None else 1.0


def _find_trainable(
    trainable: TrainableFilter,
    inputs: _ScalingInputs,
    fastest: tuple[Plan, Cost],
    ranks: int,
    batch: int,
    nodes: int,
) -> tuple[Plan, Cost] | None:
    """Return the fastest plan that can train the task, mostly the fastest of all; None without one."""
    if found := next(trainable([fastest], ranks, batch), None):
        return found
    cluster = inputs.cluster.model_copy(update={"nodes": nodes})
    plans = search_plans(inputs.facts, cluster, batch, MARGIN, inputs.recipe, ranks).fitting
    return next(trainable(plans, ranks, batch), None)


def _compare_with_first(first: ScalingPoint, point: ScalingPoint) -> ScalingPoint:
    """Return `point` with its efficiency, and the part it is lost to."""
    if point is first:
        return point

    def device_s_per_sample(at: ScalingPoint) -> dict[str, float]:
        return {part.name: part.value * at.ranks / at.batch for part in at.cost.time.parts}

    before, now = device_s_per_sample(first), device_s_per_sample(point)
    total = sum(now.values())
    name = max(now, key=lambda part: now[part] - before.get(part, 0.0))
    more = (now[name] - before.get(name, 0.0)) / total
    lost = CostPart(name, more) if more > 0 else None
    return replace(point, efficiency=sum(before.values()) / total, lost=lost)


def _no_plan_error(inputs: _ScalingInputs, batch: int, refused: Sequence[InfeasibleCount]) -> PlanError:
    """Return the error if no plan fits on any number of ranks: what the largest number lacks."""
    last = next((count for count in reversed(refused) if count.want == "memory"), refused[-1])
    if last.want != "memory":
        return PlanError(f"{last.ranks:,} ranks: {last.reason}")
    cluster = inputs.cluster.model_copy(update={"nodes": -(-last.ranks // inputs.cluster.ranks_per_node)})
    found = search_plans(inputs.facts, cluster, batch, MARGIN, inputs.recipe, last.ranks)
    return no_fit_error(found, inputs.facts, cluster, batch, inputs.recipe, last.ranks)

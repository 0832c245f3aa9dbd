"""How a training scales: the fastest plan on each of several numbers of ranks, for one batch (strong) and one batch a rank (weak)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.cost import Bill, Cost, CostPart
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.predict import default_recipe
from paceline.plan.cost_model.rates import DeviceRates, device_rates
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import bill_training
from paceline.plan.search.search import MARGIN, find_fastest, find_leanest, no_fit_error, search_plans


@dataclass(frozen=True)
class ScalingPoint:
    """The fastest plan that fits on so many ranks; `bill` of the whole training, where its tokens are said.

    efficiency: samples a second of a rank, against those on the fewest ranks of the curve.
    lost: the part that takes most more time of devices for a sample than there, as a share of all their time here.
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
    """Why no plan can be on so many ranks: for want of memory, or of samples to split; or because they would not fill their nodes."""

    ranks: int
    want: Literal["memory", "samples", "nodes"]
    reason: str


@dataclass(frozen=True)
class Curve:
    """By ranks, the fewest first."""

    points: tuple[ScalingPoint, ...]
    refused: tuple[InfeasibleCount, ...]


@dataclass(frozen=True)
class Scaling:
    """`strong`: `batch` samples a step on any number of ranks. `weak`: `each` samples of a rank, as on the fewest of `strong`.
    tokens: of the whole training. assumed: in sentences."""

    facts: ModelFacts
    cluster: Cluster
    batch: int
    each: Fraction
    strong: Curve
    weak: Curve
    tokens: float | None
    assumed: tuple[str, ...]


def predict_scaling(
    facts: ModelFacts,
    cluster: Cluster,
    counts: Sequence[int],
    batch: int,
    recipe: Recipe | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Scaling:
    """On nodes like those of the cluster, as many as it takes. Raises PlanError where no plan fits on any of `counts`."""
    most = max(-(-count // cluster.ranks_per_node) for count in counts)
    whole, assumed = add_assumptions(cluster.model_copy(update={"nodes": max(most, cluster.nodes)}))
    if most > cluster.nodes:
        many = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
        assumed = (
            f"{cluster.name or cluster.device.name} has {many}; the others of {most:,} are taken to be alike",
            *assumed,
        )
    on = _ScalingInputs(facts, whole, recipe, tokens, price, {})

    def curve(batches: dict[int, Fraction]) -> Curve:
        found = [_scaling_point(on, count, samples) for count, samples in batches.items()]
        points = [one for one in found if isinstance(one, ScalingPoint)]
        return Curve(
            points=tuple(_compare_with_first(points[0], point) for point in points),
            refused=tuple(one for one in found if isinstance(one, InfeasibleCount)),
        )

    strong = curve(dict.fromkeys(counts, Fraction(batch)))
    if not strong.points:
        raise _no_plan_error(on, batch, strong.refused)
    each = Fraction(batch, strong.points[0].ranks)
    weak = curve({count: each * count for count in counts})
    return Scaling(facts, whole, batch, each, strong, weak, tokens, assumed)


def find_last_efficient(curve: Curve, efficiency: float) -> ScalingPoint:
    """The most ranks of which each does at least such a share of what it would do among the fewest."""
    return next(
        point
        for point in reversed(curve.points)
        if point.efficiency >= efficiency or point is curve.points[0]
    )


class _ScalingInputs(NamedTuple):
    """What stays while ranks and batch change. `known`: speeds by ranks of a node, which searches on more nodes go on with."""

    facts: ModelFacts
    cluster: Cluster
    recipe: Recipe | None
    tokens: float | None
    price: float | None
    known: dict[int, DeviceRates]


def _scaling_point(where: _ScalingInputs, ranks: int, samples: Fraction) -> ScalingPoint | InfeasibleCount:
    each, cluster = where.cluster.ranks_per_node, where.cluster
    if ranks > each and ranks % each:
        below = ranks // each * each
        return InfeasibleCount(
            ranks, "nodes", f"nodes of {each} would not be full; ask for {below:,} or {below + each:,}"
        )
    if samples.denominator > 1:
        return InfeasibleCount(
            ranks, "samples", f"a batch of {float(samples):g} is no whole number of samples"
        )
    nodes, batch = -(-ranks // each), int(samples)
    if min(ranks, each) not in where.known:
        where.known[min(ranks, each)] = device_rates(cluster.model_copy(update={"nodes": nodes}), ranks=ranks)
    on = where.known[min(ranks, each)]
    recipe = where.recipe or default_recipe(on)
    if found := find_fastest(where.facts, on, ranks, batch, MARGIN, recipe):
        return ScalingPoint(
            ranks, nodes, batch, *found, bill_training(cluster, found[1], ranks, where.tokens, where.price)
        )
    best = find_leanest(where.facts, on, ranks, batch, MARGIN, recipe)
    if best is None:
        return InfeasibleCount(ranks, "samples", f"a batch of {batch:,} cannot be split over {ranks:,} ranks")
    return InfeasibleCount(ranks, "memory", f"the leanest plan, {best.plan}, {best.reason}")


def _compare_with_first(first: ScalingPoint, point: ScalingPoint) -> ScalingPoint:
    """With its efficiency, and what it is lost to."""
    if point is first:
        return point

    def of_sample(one: ScalingPoint) -> dict[str, float]:
        return {part.name: part.value * one.ranks / one.batch for part in one.cost.time.parts}

    before, now = of_sample(first), of_sample(point)
    total = sum(now.values())
    name = max(now, key=lambda part: now[part] - before.get(part, 0.0))
    more = (now[name] - before.get(name, 0.0)) / total
    lost = CostPart(name, more) if more > 0 else None
    return replace(point, efficiency=sum(before.values()) / total, lost=lost)


def _no_plan_error(where: _ScalingInputs, batch: int, refused: Sequence[InfeasibleCount]) -> PlanError:
    """What to say where no plan fits on any number of ranks: what the most ranks lack."""
    last = next((one for one in reversed(refused) if one.want == "memory"), refused[-1])
    if last.want != "memory":
        return PlanError(f"{last.ranks:,} ranks: {last.reason}")
    there = where.cluster.model_copy(update={"nodes": -(-last.ranks // where.cluster.ranks_per_node)})
    found = search_plans(where.facts, there, batch, MARGIN, where.recipe, last.ranks)
    return no_fit_error(found, where.facts, there, batch, where.recipe, last.ranks)

"""Whether the error bars of predictions leave the best plans in an order, and which measurement makes the bars narrower."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.facts import Axis, Cluster
from paceline.plan.cost_model.compare import TIME_PARTS
from paceline.plan.cost_model.cost import RUN_NOISE, Cost
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans


@dataclass(frozen=True)
class IndistinctPlans:
    """`count`: the first plan and those whose error bars overlap with its. `part`: that most of the first's bar comes from; None where
    it is what two trainings of one plan differ by. `measure`: commands."""

    count: int
    part: str | None
    measure: str


def find_indistinct_plans(found: BestPlans, target: str | None) -> IndistinctPlans | None:
    """Return what leaves the best plans without an order, or None where the first is the fastest. `target`: the task, if it is one."""
    count = count_overlapping(found.plans)
    if count < 2:
        return None
    part = find_largest_error(found.plans[0][1])
    return IndistinctPlans(count, part, _suggest_measurement(found, target, part))


def count_overlapping(plans: Sequence[tuple[Plan, Cost]]) -> int:
    """Return how many plans, the first of which is the fastest, may be as fast as it: one standard deviation up and down."""
    first = plans[0][1]
    longest_s = first.step_s * (1 + first.time.error)
    return 1 + sum(cost.step_s * (1 - cost.time.error) < longest_s for _, cost in plans[1:])


def find_largest_error(cost: Cost) -> str | None:
    """Return the part that most of the error comes from, or None where all of them together are less than the noise of trainings."""
    spread = {part.name: part.value * part.error for part in cost.time.parts}
    if sum(each**2 for each in spread.values()) < (RUN_NOISE * cost.step_s) ** 2:
        return None
    return max(spread, key=lambda name: spread[name])


def _suggest_measurement(found: BestPlans, target: str | None, part: str | None) -> str:
    """What is not measured yet and narrows the error of the part; else trainings, which show it as it is."""
    train = f"paceline train {target or 'TASK'} --ranks {found.ranks} --batch {found.batch} --plan {found.plans[0][0]}"
    if part is None:
        return f"{train} --steps 50, and the others so, too"
    cluster = found.cluster
    if cluster.device.kind == "cpu" and not cluster.paces:  # all is guessed, but what --measure has measured
        bench = f"paceline bench --task {target}" if target is not None else "paceline bench"
        if part not in TIME_PARTS["compute"]:
            return bench
        if found.facts.source != "measured":
            return f"paceline plan {target} --measure, or {bench}" if target is not None else bench
    if (
        part in TIME_PARTS["communication"]
        and (axis := _find_unmeasured_axis(cluster, found.ranks)) is not None
    ):
        return (
            "paceline bench"
            if axis == "node"
            else "paceline bench collectives --axes across, started by srun on those nodes"
        )
    return f"{train} --profile, and then paceline profile RUN --update"


def _find_unmeasured_axis(cluster: Cluster, ranks: int) -> Axis | None:
    """Return the slowest kind of link between so many ranks that nobody measured."""
    axes: list[Axis] = (
        ["across", "node"] if cluster.nodes > 1 and ranks > cluster.ranks_per_node else ["node"]
    )
    measured = {link.axis for link in cluster.links if link.beta_Bps.source == "measured"}
    return next((axis for axis in axes if axis not in measured), None)

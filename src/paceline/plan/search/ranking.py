"""Whether error bars of predictions separate the best plans, and which measurement would narrow the bars."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.facts import Axis, Cluster
from paceline.plan.cost_model.compare import TIME_PARTS
from paceline.plan.cost_model.cost import RUN_NOISE, Cost
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans


@dataclass(frozen=True)
class IndistinctPlans:
    """Best plans that the predictions cannot order.

    count: the first plan and those whose error bars overlap with its bar. part: the part that contributes
    most to the first plan's bar; None: the noise between two trainings of one plan. measure: commands that
    would narrow it.
    """

    count: int
    part: str | None
    measure: str


def find_indistinct_plans(found: BestPlans, target: str | None) -> IndistinctPlans | None:
    """Return why the best plans cannot be ordered, or None if the first is clearly the fastest.

    `target`: the task, if there is one.
    """
    count = count_overlapping(found.plans)
    if count < 2:
        return None
    part = find_largest_error(found.plans[0][1])
    return IndistinctPlans(count, part, _suggest_measurement(found, target, part))


def count_overlapping(plans: Sequence[tuple[Plan, Cost]]) -> int:
    """Return how many plans are as fast as the first within one standard deviation of both.

    plans: fastest first.
    """
    first = plans[0][1]
    longest_s = first.step_s * (1 + first.time.error_of_plan)
    return 1 + sum(cost.step_s * (1 - cost.time.error_of_plan) < longest_s for _, cost in plans[1:])


def find_largest_error(cost: Cost) -> str | None:
    """Return the part with the largest error; None if the noise between trainings is larger."""
    spread = {part.name: part.value * part.error for part in cost.time.parts}
    if sum(error_s**2 for error_s in spread.values()) < (RUN_NOISE * cost.step_s) ** 2:
        return None
    return max(spread, key=lambda name: spread[name])


def _suggest_measurement(found: BestPlans, target: str | None, part: str | None) -> str:
    """Return the command that measures the part, or else the command of a training, which shows it."""
    options = f"--ranks {found.ranks} --batch {found.batch} --plan {found.plans[0][0]}"
    if found.plans[0][0].ep > 1:
        return "a training by a system that runs experts in parallel, which Paceline does not"
    train = f"paceline train {target or 'TASK'} {options}"
    if part is None:
        return f"{train} --steps 50, and the same for the other plans"
    cluster = found.cluster
    if (
        cluster.device.kind == "cpu" and not cluster.paces
    ):  # everything is guessed except what --measure-compute measured
        bench = f"paceline bench --task {target}" if target is not None else "paceline bench"
        if part not in TIME_PARTS["compute"]:
            return bench
        if found.facts.source != "measured":
            return f"paceline plan {target} --measure-compute, or {bench}" if target is not None else bench
    if (
        part in TIME_PARTS["communication"]
        and (axis := _find_unmeasured_axis(cluster, found.ranks)) is not None
    ):
        return (
            "paceline bench"
            if axis == "node"
            else "paceline bench collectives --axes across, started with srun on those nodes"
        )
    return f"{train} --profile, then paceline profile RUN --update"


def _find_unmeasured_axis(cluster: Cluster, ranks: int) -> Axis | None:
    """Return the slowest kind of link between `ranks` ranks that is not measured."""
    axes: list[Axis] = (
        ["across", "node"] if cluster.nodes > 1 and ranks > cluster.ranks_per_node else ["node"]
    )
    measured = {link.axis for link in cluster.links if link.beta_Bps.source == "measured"}
    return next((axis for axis in axes if axis not in measured), None)

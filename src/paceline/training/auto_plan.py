"""`--plan auto`: the fastest plan that fits, of those that a task can really be trained with."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist

from paceline.cluster import local_cluster
from paceline.cluster.facts import Cluster
from paceline.distributed.world import World
from paceline.errors import PlanError, TaskError
from paceline.parallel.batch_norm import find_running_statistics
from paceline.plan.cost_model.cost import Cost, list_slower_parts
from paceline.plan.cost_model.framework_profiles import recipe_of_precision
from paceline.plan.plan import Plan, parse
from paceline.plan.search.best_plans import find_best_plans
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.model_analysis import build_meta_model, validate_plan
from paceline.training.model_facts.describe import describe
from paceline.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Choice:
    """A plan, and in a sentence why it was taken."""

    plan: Plan
    why: str


def broadcast_choice(spec: Spec, task: Task, world: World, device: str | None) -> Choice:
    """What rank 0 chooses, on all ranks. A collective. Raises PlanError and TaskError on all of them."""
    answers: list[Choice | PlanError | TaskError | None] = [None]
    if world.rank == 0:
        try:
            answers[0] = choose(spec, task, world.size, device, -(-world.size // world.local_size))
        except (PlanError, TaskError) as error:
            answers[0] = error
    if world.size > 1:
        dist.broadcast_object_list(answers, src=0)
    if not isinstance(answers[0], Choice):
        assert answers[0] is not None
        raise answers[0]
    return answers[0]


def choose(
    spec: Spec,
    task: Task,
    ranks: int,
    device: str | None = None,
    nodes: int = 1,
    cluster: Cluster | None = None,
) -> Choice:
    """For so many ranks on so many nodes like this one; `cluster`: cluster.json here, or this machine, if not said. Raises PlanError where
    no plan fits, or none of those that fit can be."""
    recipe = recipe_of_precision(spec.precision)
    cluster = cluster if cluster is not None else local_cluster.load_cluster(device)
    if nodes > cluster.nodes:
        cluster = cluster.model_copy(update={"nodes": nodes})
    found = find_best_plans(describe(spec, task), cluster, spec.batch, recipe=recipe, ranks=ranks)
    refused: list[str] = []
    can = _possible(found.plans, spec, task, ranks, refused)
    taken = next(can, None)
    if taken is None:
        raise PlanError(f"none of the {len(found.plans):,} plans that fit can be: {refused[0]}")
    return Choice(taken[0], _why(*taken, next(can, None)))


def _possible(
    found: list[tuple[Plan, Cost]], spec: Spec, task: Task, ranks: int, refused: list[str]
) -> Iterator[tuple[Plan, Cost]]:
    """Those that nothing speaks against, without any process being started. `refused`: is told why others cannot be."""
    sees_batches = bool(find_running_statistics(build_meta_model(spec, task).model))
    for plan, cost in found:
        on = plan.resolve(ranks)
        if sees_batches and on.microbatches != 1:
            refused.append(f"plan {plan} cuts the batch, and the statistics of BatchNorm with it")
            continue
        try:
            validate_plan(spec, on, task)
        except (PlanError, TaskError) as error:
            refused.append(str(error))
            continue
        yield shortest(plan, ranks), cost


def shortest(plan: Plan, ranks: int) -> Plan:
    """The same without what goes without saying on so many ranks."""
    for key in ("dp", "microbatches", "stages", "pp_schedule"):
        if key == "dp" and ranks == 1:  # as in `single`
            continue
        with contextlib.suppress(PlanError):
            less: Plan = replace(plan, **{key: None})  # type: ignore[arg-type]
            plan = less if less.resolve(ranks) == plan.resolve(ranks) else plan
    return parse(str(plan))


def _why(plan: Plan, cost: Cost, other: tuple[Plan, Cost] | None) -> str:
    room = f"{format_bytes(cost.peak_bytes)} of {format_bytes(cost.memory.limit_bytes)}"
    said = f"auto took plan {plan}: {format_seconds(cost.step_s)} a step predicted (± {cost.time.error:.0%}), {room} a rank"
    if other is None:
        return f"{said}; no other plan can be"
    missing = next((part.name for part in list_slower_parts(other[1], cost) if part.value > 0), None)
    slower = other[1].step_s - cost.step_s
    most = f", most of it {missing}" if missing else ""
    return f"{said}; the next best, {other[0]}, takes {format_seconds(slower)} more{most}"

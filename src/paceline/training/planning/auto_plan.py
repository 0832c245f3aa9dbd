"""`--plan auto`: the fastest predicted plan that fits and can train the task."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch.distributed as dist

from paceline.cluster import local_cluster
from paceline.cluster.facts import Cluster
from paceline.distributed.world import World
from paceline.errors import PlanError, TaskError
from paceline.parallel.data_parallel.batch_norm import find_running_statistics
from paceline.plan.cost_model.cost import Cost, list_slower_parts
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.plan import Plan, parse
from paceline.plan.search.best_plans import BestPlans, find_best_plans
from paceline.spec import Spec
from paceline.task import Task, has_own_optimizer
from paceline.training.model_facts.describe import describe
from paceline.training.model_facts.model_analysis import build_meta_model, validate_plan
from paceline.units import format_bytes, format_seconds, several

SIMILAR = 0.02  # of a step: predictions that differ by less do not separate plans


@dataclass(frozen=True)
class PlanChoice:
    """A plan, and a sentence that says why it was chosen."""

    plan: Plan
    why: str


def broadcast_choice(spec: Spec, task: Task, world: World, device: str | None) -> PlanChoice:
    """Return the choice of rank 0 on all ranks. A collective. Raises PlanError and TaskError on all ranks."""
    answers: list[PlanChoice | PlanError | TaskError | None] = [None]
    if world.rank == 0:
        try:
            answers[0] = choose_plan(spec, task, world.size, device, -(-world.size // world.local_size))
        except (PlanError, TaskError) as error:
            answers[0] = error
    if world.size > 1:
        dist.broadcast_object_list(answers, src=0)
    if not isinstance(answers[0], PlanChoice):
        assert answers[0] is not None
        raise answers[0]
    return answers[0]


def choose_plan(
    spec: Spec,
    task: Task,
    ranks: int,
    device: str | None = None,
    nodes: int = 1,
    cluster: Cluster | None = None,
) -> PlanChoice:
    """Return the fastest predicted plan for `ranks` ranks on `nodes` nodes like this machine.

    cluster: the machine [default: cluster.json in this folder, or a description of this machine]. Raises
    PlanError if no plan fits, or if none of those that fit can train the task.
    """
    cluster = cluster if cluster is not None else local_cluster.load_cluster(device)
    if nodes > cluster.nodes:
        cluster = cluster.model_copy(update={"nodes": nodes})
    facts = describe(spec, task)
    try:
        recipe = recipe_of_request(spec, facts, has_own_optimizer(task))
    except PlanError as error:
        raise PlanError(f"{error}, or name a plan") from error
    found = find_best_plans(facts, cluster, spec.batch, recipe=recipe, ranks=ranks)
    refused: list[str] = []
    possible = find_trainable(found.plans, spec, task, ranks, refused)
    fastest = next(possible, None)
    if fastest is None:
        raise PlanError(f"none of the {len(found.plans):,} plans that fit can train this task: {refused[0]}")
    plan, cost = _find_whole_batches(fastest, found.plans, ranks)
    second = next(((shorten_plan(other, ranks), c) for other, c in possible if c.step_s > cost.step_s), None)
    chosen = shorten_plan(plan, ranks)
    return PlanChoice(chosen, _explain(chosen, cost, second))


def _find_whole_batches(
    fastest: tuple[Plan, Cost], plans: Iterable[tuple[Plan, Cost]], ranks: int
) -> tuple[Plan, Cost]:
    """Return the same plan with the fewest micro-batches that is predicted to be as fast.

    More micro-batches cost calls and sums of gradients; two percent of a step do not separate predictions.
    """
    plan, cost = fastest
    similar = [
        (other, other_cost)
        for other, other_cost in plans
        if other_cost.step_s <= cost.step_s * (1 + SIMILAR)
        and replace(other, microbatches=None) == replace(plan, microbatches=None)
    ]
    return min([fastest, *similar], key=lambda pair: pair[0].resolve(ranks).microbatches)


def find_trainable(
    plans: Iterable[tuple[Plan, Cost]], spec: Spec, task: Task, ranks: int, refused: list[str]
) -> Iterator[tuple[Plan, Cost]]:
    """Yield the plans that can train the task, without starting a process.

    refused: gets the reasons against others.
    """
    has_batch_statistics = bool(find_running_statistics(build_meta_model(spec, task).model))
    for plan, cost in plans:
        resolved = plan.resolve(ranks)
        if has_batch_statistics and resolved.microbatches != 1:
            refused.append(f"plan {plan} cuts the batch, and the statistics of BatchNorm with it")
            continue
        try:
            validate_plan(spec, resolved, task)
        except (PlanError, TaskError) as error:
            refused.append(str(error))
            continue
        yield plan, cost


def drop_refused(found: BestPlans, spec: Spec, task: Task, top: int) -> BestPlans:
    """Return the plans without those among the first that `train` refuses, so that `top` plans can train.

    The plans after these are not checked. Raises PlanError if no plan can train the task.
    """
    refused: list[str] = []
    remaining = iter(found.plans)
    kept = list(islice(find_trainable(remaining, spec, task, found.ranks, refused), top))
    if not kept:
        raise PlanError(refused[0])
    if not refused:
        return found
    note = f"left out, since train refuses them, {several(len(refused), 'plan')}: {refused[0]}"
    return replace(found, plans=[*kept, *remaining], assumed=(*found.assumed, note))


def shorten_plan(plan: Plan, ranks: int) -> Plan:
    """Return the same plan without the keys that follow from the number of ranks."""
    for key in ("dp", "microbatches", "stages", "pp_schedule"):
        if key == "dp" and ranks == 1:  # as in `single`
            continue
        with contextlib.suppress(PlanError):
            shorter: Plan = replace(plan, **{key: None})  # type: ignore[arg-type]
            plan = shorter if shorter.resolve(ranks) == plan.resolve(ranks) else plan
    return parse(str(plan))


def _explain(plan: Plan, cost: Cost, second: tuple[Plan, Cost] | None) -> str:
    memory = f"{format_bytes(cost.peak_bytes)} of {format_bytes(cost.memory.limit_bytes)}"
    chosen = (
        f"auto chose plan {plan}: {format_seconds(cost.step_s)} a step predicted (± {cost.time.error:.0%}), "
        f"{memory} a rank"
    )
    if second is None:
        return f"{chosen}; no other plan is possible"
    missing = next((part.name for part in list_slower_parts(second[1], cost) if part.value > 0), None)
    slower_s = second[1].step_s - cost.step_s
    most = f", most of it {missing}" if missing else ""
    return f"{chosen}; the next best, {second[0]}, takes {format_seconds(slower_s)} more{most}"

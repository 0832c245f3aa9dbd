"""Replan a run for another number of ranks: the same plan if possible, else the most similar.

The global batch stays.
"""

from paceline import task as tasks
from paceline.errors import PlanError, TaskError
from paceline.parallel.data_parallel.batch_norm import find_running_statistics
from paceline.plan.plan import AUTO, Plan, micro_batch_size, parse
from paceline.plan.search.nearest import find_nearest_plans
from paceline.spec import Launch, Spec
from paceline.training.model_facts.model_analysis import build_meta_model, validate_plan
from paceline.units import several


def replan(spec: Spec, before: Launch, launch: Launch) -> Launch:
    """Return `launch` with a plan for its ranks, and in `chosen` why it is not the plan of `before`.

    A plan that auto chose is left to auto again if the ranks divide the batch: auto proposes no uneven
    shares. Raises PlanError if no similar plan is possible.
    """
    assert launch.ranks is not None
    is_auto = AUTO in (before.asked, before.plan)
    if is_auto and (before.plan == AUTO or spec.batch % launch.ranks == 0):
        return launch.model_copy(update={"plan": AUTO, "chosen": None})
    requested, then = (
        (before.plan, before.ranks)
        if is_auto
        else (before.asked or before.plan, before.asked_ranks or before.ranks)
    )
    if then is None:
        return launch.model_copy(update={"plan": requested, "chosen": None})
    if requested is None:
        requested = str(Plan(dp=1) if then == 1 else Plan())
    plan, why = _find_similar(spec, parse(requested), then, launch.ranks)
    is_other = str(plan) != requested
    if is_auto:
        return launch.model_copy(update={"plan": str(plan), "chosen": why or None, "asked": AUTO})
    return launch.model_copy(
        update={
            "plan": str(plan),
            "chosen": why if is_other else None,
            "asked": requested if is_other else None,
            "asked_ranks": then if is_other else None,
        }
    )


def _find_similar(spec: Spec, requested: Plan, then: int, ranks: int) -> tuple[Plan, str]:
    """Return the plan for `ranks` most similar to `requested` on `then` ranks, and why it differs."""
    if ranks == then:
        return requested, ""
    task = tasks.load_task(spec.task, spec.set)
    has_batch_statistics = bool(find_running_statistics(build_meta_model(spec, task).model))
    refused = _find_refusal(spec, requested, ranks, task)
    for plan in find_nearest_plans(requested, then, ranks, spec.batch, may_cut=not has_batch_statistics):
        if (problem := _find_refusal(spec, plan, ranks, task)) is None:
            most = micro_batch_size(spec.batch, requested.resolve(then))
            why = refused
            if why is None and plan.microbatches != requested.microbatches:
                why = f"no rank holds more than {most} samples of the {spec.batch} at a time, as before"
            change = f"plan {plan} on {several(ranks, 'rank')}, in place of {requested} on {then}"
            return plan, f"{change}: {why}" if why else change
        refused = refused or problem
    raise PlanError(
        f"no plan similar to {requested} is possible on {several(ranks, 'rank')}: "
        f"{refused or f'batch {spec.batch} cannot be divided among them'}; specify --plan"
    )


def _find_refusal(spec: Spec, plan: Plan, ranks: int, task: tasks.Task) -> str | None:
    """Return why this plan is not possible; None if it is."""
    try:
        resolved = plan.resolve(ranks)
        micro_batch_size(spec.batch, resolved)
        if resolved.splits_model or resolved.cp > 1 or spec.compile:
            validate_plan(spec, resolved, task)
    except (PlanError, TaskError) as error:
        return str(error).partition(": use ")[0]
    return None

"""A run on other ranks than its plan was made for: the same plan where it can be, else the one most like it; the global batch stays."""

from paceline import task as tasks
from paceline.errors import PlanError, TaskError
from paceline.parallel.batch_norm import find_running_statistics
from paceline.plan.plan import AUTO, Plan, micro_batch_size, parse
from paceline.plan.search.nearest import find_nearest_plans
from paceline.spec import Launch, Spec
from paceline.training.model_analysis import build_meta_model, validate_plan
from paceline.units import several


def refit(spec: Spec, before: Launch, launch: Launch) -> Launch:
    """`launch` with a plan for its ranks, and in `chosen` why it is not the one of `before`. One that auto took is left to auto again,
    which knows no uneven shares.

    Raises PlanError where no plan like that can be."""
    assert launch.ranks is not None
    by_auto = AUTO in (before.asked, before.plan)
    if by_auto and (before.plan == AUTO or spec.batch % launch.ranks == 0):
        return launch.model_copy(update={"plan": AUTO, "chosen": None})
    asked, then = (
        (before.plan, before.ranks)
        if by_auto
        else (before.asked or before.plan, before.asked_ranks or before.ranks)
    )
    if then is None:
        return launch.model_copy(update={"plan": asked, "chosen": None})
    if asked is None:
        asked = str(Plan(dp=1) if then == 1 else Plan())
    plan, why = _nearest(spec, parse(asked), then, launch.ranks)
    is_other = str(plan) != asked
    if by_auto:
        return launch.model_copy(update={"plan": str(plan), "chosen": why or None, "asked": AUTO})
    return launch.model_copy(
        update={
            "plan": str(plan),
            "chosen": why if is_other else None,
            "asked": asked if is_other else None,
            "asked_ranks": then if is_other else None,
        }
    )


def _nearest(spec: Spec, asked: Plan, then: int, ranks: int) -> tuple[Plan, str]:
    if ranks == then:
        return asked, ""
    task = tasks.load_task(spec.task, spec.set)
    sees_batches = bool(find_running_statistics(build_meta_model(spec, task).model))
    refused = _refusal(spec, asked, ranks, task)
    for plan in find_nearest_plans(asked, then, ranks, spec.batch, may_cut=not sees_batches):
        if (wrong := _refusal(spec, plan, ranks, task)) is None:
            most = micro_batch_size(spec.batch, asked.resolve(then))
            is_cut = plan.microbatches != asked.microbatches
            why = refused or (
                f"no rank holds more than {most} samples of the {spec.batch} at a time, as before"
                if is_cut
                else None
            )
            return plan, f"plan {plan} on {several(ranks, 'rank')}, in place of {asked} on {then}" + (
                f": {why}" if why else ""
            )
        refused = refused or wrong
    raise PlanError(
        f"no plan like {asked} can be on {several(ranks, 'rank')}: {refused or f'batch {spec.batch} cannot be split so'}; say --plan"
    )


def _refusal(spec: Spec, plan: Plan, ranks: int, task: tasks.Task) -> str | None:
    """Why this plan cannot be; None where it can."""
    try:
        on = plan.resolve(ranks)
        micro_batch_size(spec.batch, on)
        if on.splits_model or on.cp > 1 or spec.compile:
            validate_plan(spec, on, task)
    except (PlanError, TaskError) as error:
        return str(error).partition(": use ")[0]
    return None

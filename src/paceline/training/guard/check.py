"""Which comparisons a plan and a task allow; contradictions are errors before the first step."""

from paceline.data.open_samples import find_streams
from paceline.data.samples import Samples
from paceline.errors import PlanError
from paceline.parallel.loss.auxiliary_loss import has_auxiliary_loss
from paceline.parallel.loss.forward import has_global_loss
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task


def has_replicas(plan: ResolvedPlan) -> bool:
    """Return whether other ranks hold the same weights as this rank, or the same part of them."""
    return not plan.is_asynchronous and _count_shards(plan) < plan.data_ranks


def find_copy(plan: ResolvedPlan, rank: int) -> tuple[int, int, int]:
    """Return the part of the weights that a rank holds: its stage, its part of tensors, and its shard.

    Ranks with equal values are replicas of one another.
    """
    place = plan.place(rank)
    return place.pp, place.tp, (place.dp * plan.cp + place.cp) % _count_shards(plan)


def _count_shards(plan: ResolvedPlan) -> int:
    """Return how many shards the data ranks divide the weights into."""
    return plan.data_ranks // plan.replicate if plan.zero >= 2 else 1


def has_equal_state(plan: ResolvedPlan) -> bool:
    """Return whether replicas hold the same optimizer state."""
    return has_replicas(plan) and plan.zero != 1


def check_guard(spec: Spec, plan: ResolvedPlan, requested: str, task: Task, training: Samples) -> None:
    """Raise PlanError if the comparisons that `spec.guard` requests are impossible.

    requested: the plan in the words of the user.
    """
    guard = spec.guard
    if guard.every is None:
        return
    option = f"guard.every={guard.every}"
    if plan.is_asynchronous:
        raise PlanError(
            f"{option} compares weights, and plan {requested} has other weights on each rank; leave it out"
        )
    if not has_replicas(plan) and not (guard.locate or guard.recompute):
        raise PlanError(
            f"{option} compares replicas, and plan {requested} has a single copy of each weight; add "
            "guard.locate=true, which finds weights that change between two updates"
        )
    has_updates = type(task).updates is not Task.updates
    if guard.locate and has_updates:
        raise PlanError(
            "guard.locate=true requires one update per step, and the task has several; leave it out"
        )
    if guard.recompute and (obstacle := _find_obstacle(spec, plan, requested, task, training)) is not None:
        raise PlanError(f"guard.recompute=true requires {obstacle}; leave it out")


def _find_obstacle(
    spec: Spec, plan: ResolvedPlan, requested: str, task: Task, training: Samples
) -> str | None:
    """Return what a loss that a second rank computes requires, and the request lacks; None if nothing."""
    if plan.dp < 2 or plan.model_degree > 1:
        return f"data ranks that hold the whole model, which plan {requested} does not have"
    if spec.compile:
        return "the same kernels on both ranks, and compile=true may choose others"
    if find_streams(training.dataset):
        return "samples that can be read again, and the task has a Stream"
    if has_global_loss(task) or has_auxiliary_loss(task) or type(task).updates is not Task.updates:
        return "a loss of each micro-batch alone, without global_loss, auxiliary_loss or updates"
    return None

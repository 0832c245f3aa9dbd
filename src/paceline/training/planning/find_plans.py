"""`paceline.find_plans`: search plans from Python."""

from paceline.cluster import local_cluster
from paceline.cluster.facts import Cluster
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans, find_best_plans
from paceline.spec import Spec
from paceline.task import Task, has_own_optimizer, load_task
from paceline.training.model_facts.describe import describe


def find_plans(
    spec: Spec,
    ranks: int | None = None,
    cluster: Cluster | None = None,
    *,
    plan: Plan | str | None = None,
    task: Task | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> BestPlans:
    """Return the plans that fit, fastest first, each with its predicted time and memory. Nothing is started.

        best = paceline.find_plans(paceline.Spec(task="digits", batch=64), ranks=8)
        plan, cost = best.plans[0]
        print(plan, cost.step_s, cost.peak_bytes)

    spec: the task, its global batch (samples) and the precision.
    ranks: number of processes [default: one per device of the cluster].
    cluster: where to train [default: cluster.json in this folder, or this machine].
    plan: predict this plan alone.
    task: an instance, instead of the task that `spec` names.
    tokens: length of the whole training; `best.bill(cost)` then has its time and energy.
    price: of a device hour; the bill then has the price.

    Raises PlanError if no plan fits or `plan` is not possible, ClusterError if too little is known of the
    cluster, TaskError if the model cannot be described.
    """
    cluster = cluster if cluster is not None else local_cluster.load_cluster()
    wanted = str(plan) if plan is not None else None
    task = task if task is not None else load_task(spec.task, spec.set)
    facts = describe(spec, task)
    recipe = recipe_of_request(spec, facts, has_own_optimizer(task))
    return find_best_plans(facts, cluster, spec.batch, wanted, recipe, ranks, tokens, price)

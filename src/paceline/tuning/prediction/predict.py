"""Predict what a trial needs before it starts: memory, time, parameters, energy and price of a training.

A trial that cannot fit is refused, or gets another plan or more ranks, before any process starts.
"""

import contextlib
import functools
import math
from dataclasses import dataclass

from paceline.cluster.facts import Cluster
from paceline.errors import DataError, PlanError
from paceline.plan.cost_model.cost import Cost, compute_bill
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import find_best_plans
from paceline.spec import Launch, Spec
from paceline.task import Task, has_own_optimizer, load_task
from paceline.tuning.prediction.placement import Placement, RefusedTrial
from paceline.tuning.prediction.quantities import Bound, format_quantity
from paceline.user_code import UserCode


@functools.cache
def _load_cluster(device: str | None) -> Cluster:
    from paceline.cluster import local_cluster

    return local_cluster.load_cluster(device)


def predict_trial(spec: Spec, launch: Launch, ranks: int) -> Placement:
    """Return the placement of a trial on a number of ranks.

    If its plan does not fit, it gets the fastest plan that fits. Raises RefusedTrial if none does, and the
    Error of a task that cannot be described.
    """
    from paceline.training.planning.auto_plan import shorten_plan

    model = _describe_model(spec, launch)
    plan = _name_plan(launch, ranks)
    if plan is not None:
        _, cost = model.predict(plan, ranks)
        if cost.memory.fits():
            return Placement(ranks, None, model.list_quantities(cost, ranks))
    try:
        best, cost = model.predict(None, ranks)
    except PlanError as error:
        raise RefusedTrial(str(error)) from error
    return Placement(ranks, str(shorten_plan(best, ranks)), model.list_quantities(cost, ranks))


def predict_quantities(spec: Spec, launch: Launch, ranks: int) -> dict[str, float]:
    """Return what is predicted of a trial under its plan. Raises an Error if it cannot be predicted."""
    model = _describe_model(spec, launch)
    _, cost = model.predict(_name_plan(launch, ranks), ranks)
    return {name: value for name, value in model.list_quantities(cost, ranks).items() if math.isfinite(value)}


def _name_plan(launch: Launch, ranks: int) -> str | None:
    """Return the plan of a trial, or None if it is the fastest that fits."""
    plan = launch.plan or ("ddp" if ranks > 1 else "single")
    return None if plan == "auto" else plan


@dataclass(frozen=True)
class _DescribedModel:
    """What the prediction of a trial needs to know."""

    spec: Spec
    task: Task
    facts: ModelFacts
    cluster: Cluster

    def predict(self, plan: str | None, ranks: int) -> tuple[Plan, Cost]:
        """Return a plan and its cost; None: the fastest that fits. Raises PlanError."""
        recipe = recipe_of_request(self.spec, self.facts, has_own_optimizer(self.task))
        found = find_best_plans(self.facts, self.cluster, self.spec.batch, plan, recipe, ranks)
        return found.plans[0]

    def list_quantities(self, cost: Cost, ranks: int) -> dict[str, float]:
        """Return the predicted quantities by name."""
        return _list_quantities(self.spec, self.task, self.facts.params, cost, self.cluster, ranks)


def _describe_model(spec: Spec, launch: Launch) -> _DescribedModel:
    from paceline.training.model_facts.describe import describe

    task = load_task(spec.task, spec.set)
    return _DescribedModel(spec, task, describe(spec, task), _load_cluster(launch.device))


def choose_ranks(spec: Spec, launch: Launch, most: int) -> Placement:
    """Return the placement on the least number of ranks on which a trial fits.

    Few ranks per trial use the pool best: no time is lost to communication. Raises RefusedTrial.
    """
    ranks, refusal = 1, RefusedTrial("no plan fits")
    while ranks <= most:
        try:
            return predict_trial(spec, launch, ranks)
        except RefusedTrial as error:
            refusal = error
        except PlanError:
            if ranks == most:
                raise
        ranks = min(2 * ranks, most) if ranks < most else most + 1
    raise refusal


def _list_quantities(
    spec: Spec, task: Task, parameters: float, cost: Cost, cluster: Cluster, ranks: int
) -> dict[str, float]:
    found = {"step_s": cost.step_s, "memory": cost.peak_bytes, "parameters": float(parameters)}
    steps = _count_steps(spec, task)
    if steps is not None:
        power = cluster.device.power_W if cluster.device.kind != "cpu" else None
        price = cluster.price_per_device_hour
        bill = compute_bill(
            cost.step_s, steps, ranks, power.value if power else None, price.value if price else None
        )
        found["time"] = bill.seconds
        found |= {
            name: value for name, value in (("energy", bill.kWh), ("price", bill.price)) if value is not None
        }
    return found


def _count_steps(spec: Spec, task: Task) -> int | None:
    """Return the number of steps of a training, or None if that of the samples is not known."""
    if spec.steps is not None:
        return spec.steps
    length = UserCode("the length of dataset('train')", task.dataset, DataError)
    with contextlib.suppress(DataError), length:
        return spec.total_steps(len(task.dataset("train")))  # type: ignore[arg-type]
    return None  # a stream has no length; if the data is missing, the ranks report it


def check_bounds(bounds: list[Bound], placement: Placement) -> None:
    """Raise RefusedTrial if a prediction violates a condition."""
    for bound in bounds:
        if not bound.holds(placement.predicted):
            value = placement.predicted.get(bound.name)
            if value is None:
                raise RefusedTrial(f"no {bound.name} is predicted, but the study requires {bound.text}")
            predicted = format_quantity(bound.name, value)
            raise RefusedTrial(
                f"the prediction is {bound.name}={predicted}, but the study requires {bound.text}"
            )

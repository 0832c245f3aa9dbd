"""Prediction of the cost of a plan, from facts of the model, plan and cluster."""

from paceline.cluster.facts import Cluster
from paceline.plan.cost_model.cost import Cost, CostPart, TimeCost
from paceline.plan.cost_model.framework_profiles import FLOAT32, PACELINE, PACELINE_FP16, Recipe
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.rates import DeviceRates, device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit, split_work
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan


def predict(
    facts: ModelFacts,
    plan: Plan,
    cluster: Cluster,
    batch: int,
    recipe: Recipe | None = None,
    ranks: int | None = None,
) -> Cost:
    """Return the cost of a step with `batch` samples on `ranks` ranks, or on all devices.

    Raises PlanError for an impossible plan, or a machine of which too little is known.
    """
    count = ranks or cluster.devices
    rates = device_rates(cluster, ranks=count)
    return predict_split(facts, split_work(plan, count, batch), recipe or default_recipe(rates), rates)


def predict_split(facts: ModelFacts, split: WorkSplit, recipe: Recipe, rates: DeviceRates) -> Cost:
    """Return the cost of a split."""
    return Cost(
        predict_time(facts, split, recipe, rates),
        predict_memory(facts, split, recipe, rates.memory_bytes),
        split.micro_batch,
    )


def default_recipe(rates: DeviceRates) -> Recipe:
    """Return the recipe of 16-bit autocast if the device has a rate for it, else of float32."""
    return PACELINE if "bf16" in rates.flops else PACELINE_FP16 if "fp16" in rates.flops else FLOAT32


def add_input_and_save(
    time_: TimeCost, input_s: float = 0.0, save_s: float = 0.0, steps_between_saves: float = 1.0
) -> TimeCost:
    """Return the time with the seconds that a rank waits for its batch and for checkpoints."""
    extra = (
        CostPart("input", max(0.0, input_s - time_.step_s), 0.3, "time to prepare a batch beyond the step"),
        CostPart(
            "save", save_s / steps_between_saves, 0.3, f"a checkpoint every {steps_between_saves:g} steps"
        ),
    )
    parts = (*time_.parts, *(part for part in extra if part.value))
    return TimeCost(
        parts, time_.flops, time_.hardware_flops, time_.tokens, time_.samples, time_.peak_flops, time_.guesses
    )

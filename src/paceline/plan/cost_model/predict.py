"""What a plan costs on a cluster: the arrow from facts, plan and cluster to Cost."""

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
    """Of a step with `batch` samples, on all devices or on so many ranks. Raises PlanError for a plan that cannot be, or a machine of
    which too little is known."""
    count = ranks or cluster.devices
    on = device_rates(cluster, ranks=count)
    return predict_split(facts, split_work(plan, count, batch), recipe or default_recipe(on), on)


def predict_split(facts: ModelFacts, cut: WorkSplit, recipe: Recipe, on: DeviceRates) -> Cost:
    return Cost(
        predict_time(facts, cut, recipe, on),
        predict_memory(facts, cut, recipe, on.memory_bytes),
        cut.micro_batch,
    )


def default_recipe(on: DeviceRates) -> Recipe:
    """16 bits by autocast where the device has a rate for them; else float32."""
    return PACELINE if "bf16" in on.flops else PACELINE_FP16 if "fp16" in on.flops else FLOAT32


def add_input_and_save(
    time_: TimeCost, input_s: float = 0.0, save_s: float = 0.0, steps_between_saves: float = 1.0
) -> TimeCost:
    """With what the planner cannot know by itself: seconds that a rank waits for its batch, and for a checkpoint."""
    extra = (
        CostPart(
            "input", max(0.0, input_s - time_.step_s), 0.3, "what preparing a batch takes longer than a step"
        ),
        CostPart(
            "save", save_s / steps_between_saves, 0.3, f"a checkpoint each {steps_between_saves:g} steps"
        ),
    )
    parts = (*time_.parts, *(part for part in extra if part.value))
    return TimeCost(
        parts, time_.flops, time_.hardware_flops, time_.tokens, time_.samples, time_.peak_flops, time_.guesses
    )

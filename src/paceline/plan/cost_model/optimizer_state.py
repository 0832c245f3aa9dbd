"""The recipe of a request: bytes per weight, with those of its optimizer."""

from dataclasses import replace
from functools import lru_cache

from paceline.optimizer_options import count_moments
from paceline.plan.cost_model.framework_profiles import FLOAT32_TF32, Recipe, recipe_of_precision
from paceline.plan.model.facts import ModelFacts
from paceline.spec import Optimizer, Spec

FLOAT32_BYTES = 4.0


def recipe_of_request(spec: Spec, facts: ModelFacts, has_own_optimizer: bool) -> Recipe:
    """Return Paceline's recipe for the precision and the optimizer of a request.

    has_own_optimizer: whether the task defines one, which is unknown, and taken for AdamW. Raises PlanError
    for a precision that cannot be predicted.
    """
    recipe = recipe_of_precision(spec.precision)
    if spec.tf32 and spec.precision == "fp32":
        recipe = FLOAT32_TF32
    if has_own_optimizer:
        return recipe
    return _with_moments(recipe, moments_per_weight(spec.optimizer, facts))


@lru_cache(maxsize=64)
def _with_moments(recipe: Recipe, moments: float) -> Recipe:
    """Return the same object for the same numbers: caches of predictions compare recipes by identity."""
    bytes_ = FLOAT32_BYTES * moments
    return recipe if bytes_ == recipe.optimizer else replace(recipe, optimizer=bytes_)


def moments_per_weight(optimizer: Optimizer, facts: ModelFacts) -> float:
    """Return the elements of optimizer state per weight.

    Muon trains embeddings and the last layer by AdamW, which has one moment more.
    """
    moments = count_moments(optimizer.name, optimizer.options)
    if optimizer.name != "muon":
        return moments
    by_adamw = facts.first.params + facts.last.params
    return moments + (count_moments("adamw", {}) - moments) * by_adamw / max(1, facts.params)

"""The state per weight that predictions assume, compared with the state that optimizers really have."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import models
from paceline import Spec
from paceline.cluster.published import find
from paceline.optimizer_options import MOMENTS, OPTIMIZERS
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.cost_model.optimizer_state import moments_per_weight, recipe_of_request
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.library import load_model
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Optimizer
from paceline.task import has_own_optimizer, load_task
from paceline.training.model_facts.describe import describe
from paceline.training.optimization.optimizer import make_optimizer

OPTIONS = [
    *(Optimizer(name=name) for name in OPTIMIZERS if name != "muon"),
    Optimizer(name="adam", amsgrad=True),
    Optimizer(name="sgd", momentum=0.0),
    Optimizer(name="lars", momentum=0.0),
    Optimizer(name="rmsprop", momentum=0.9, centered=True),
]


def count_state(spec: Optimizer, model: nn.Module) -> float:
    """Return the elements of state per weight after a step."""
    optimizer = make_optimizer(models.Points(), spec, ResolvedPlan(), model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    elements = sum(value.numel() for value in state if isinstance(value, torch.Tensor))
    return elements / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "optimizer", OPTIONS, ids=lambda options: f"{options.name}-{'-'.join(sorted(options.model_fields_set))}"
)
def test_state_of_each_optimizer(optimizer: Optimizer) -> None:
    model = nn.Sequential(nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False))
    assert moments_per_weight(optimizer, load_model("gpt2")) == pytest.approx(
        count_state(optimizer, model), abs=0.03
    )


def test_every_optimizer_has_an_entry() -> None:
    assert MOMENTS.keys() == OPTIMIZERS.keys()


def test_state_of_muon() -> None:
    task, optimizer = load_task("text", {"width": 64, "depth": 2}), Optimizer(name="muon")
    facts = describe(Spec(task="text", set={"width": 64, "depth": 2}), task)
    assert moments_per_weight(optimizer, facts) == pytest.approx(
        count_state(optimizer, task.model()), rel=0.05
    )


def memory_and_time(facts: ModelFacts, moments: float, zero: int) -> tuple[float, float]:
    recipe = replace(FLOAT32, optimizer=4 * moments)
    cost = predict(facts, Plan(dp=4, zero=zero), find("a100-40g:4@25"), 32, recipe, ranks=4)
    return cost.peak_bytes, cost.step_s


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_and_time_follow_the_optimizer(zero: int) -> None:
    facts = load_model("gpt2")
    per_rank = 4 * facts.params / (4 if zero else 1)
    costs = [memory_and_time(facts, moments, zero) for moments in (0, 1, 2)]
    for (less, faster), (more, slower) in pairwise(costs):
        assert more - less == pytest.approx(per_rank, rel=0.1)
        assert faster < slower


def test_an_optimizer_of_the_task_is_taken_for_adamw() -> None:
    facts = load_model("gpt2")
    spec = Spec(optimizer=Optimizer(name="lion"))
    assert recipe_of_request(spec, facts, has_own_optimizer(models.OwnOptimizer())).optimizer == 8
    recipe = recipe_of_request(spec, facts, has_own_optimizer(models.Points()))
    assert recipe.optimizer == 4
    assert recipe is recipe_of_request(spec, facts, has_own_optimizer(models.Points())), (
        "caches compare recipes by identity"
    )

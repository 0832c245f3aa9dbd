"""On how many nodes a token has experts, compared with draws; and what that costs between nodes."""

import random
from dataclasses import replace

import pytest

from paceline.cluster.published import parse as parse_cluster
from paceline.errors import SpecError
from paceline.plan.cost_model.expert_routing import expected_nodes
from paceline.plan.cost_model.framework_profiles import NEMO, RECIPES
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.library import load_model, load_transformer
from paceline.plan.plan import Plan

DRAWS = 4000


def draw_nodes(experts: int, active: int, nodes: int, groups: int, limit: int) -> float:
    """Return the mean number of nodes over random choices of experts. Node and group are runs of experts."""
    random.seed(0)
    size, own = experts // groups, experts // nodes
    total = 0
    for _ in range(DRAWS):
        allowed = random.sample(range(groups), limit)
        eligible = [group * size + index for group in allowed for index in range(size)]
        total += len({expert // own for expert in random.sample(eligible, active)})
    return total / DRAWS


@pytest.mark.parametrize(
    ("experts", "active", "nodes", "groups", "limit"),
    [
        (256, 8, 8, 8, 4),  # DeepSeek V3 as it was trained: a group is a node
        (256, 8, 8, 1, 1),  # without its limit
        (256, 8, 2, 8, 4),  # four groups on a node
        (256, 8, 32, 8, 4),  # a group on four nodes
        (160, 6, 4, 8, 3),  # DeepSeek V2
        (8, 2, 4, 1, 1),  # Mixtral
        (128, 4, 8, 1, 1),
        (8, 2, 1, 1, 1),
    ],
)
def test_expectation_is_that_of_draws(experts: int, active: int, nodes: int, groups: int, limit: int) -> None:
    expected = expected_nodes(experts, active, nodes, groups, limit)
    assert expected == pytest.approx(draw_nodes(experts, active, nodes, groups, limit), rel=0.01)
    assert expected <= min(nodes, active) + 1e-12
    if nodes == groups:
        assert expected <= limit


def test_a_limit_makes_tokens_cheaper_between_nodes() -> None:
    """Inside a node the limit changes nothing; without deduplication neither does it between nodes."""
    cluster, plan = parse_cluster("h100:8x64@50"), Plan(zero=1, dp=64, pp=8, ep=64, microbatches=8)
    limited, free = load_model("deepseek-v3"), load_model("deepseek-v3", expert_groups=1, group_limit=1)

    def sent_s(facts, recipe, plan: Plan = plan) -> float:
        cost = predict(facts, plan, cluster, 512, recipe)
        return next(part.value for part in cost.time.parts if part.name == "expert parallel")

    assert 0.65 < sent_s(limited, NEMO) / sent_s(free, NEMO) < 0.75
    whole = replace(NEMO, deduplicates=False)
    assert sent_s(limited, whole) == sent_s(free, whole) > 1.4 * sent_s(free, NEMO)
    inside = replace(plan, ep=8)
    assert sent_s(limited, NEMO, inside) == sent_s(free, NEMO, inside) == sent_s(free, whole, inside)
    eight_bits = replace(NEMO, dispatch=1.0)
    assert sent_s(limited, eight_bits) == pytest.approx(0.75 * sent_s(limited, NEMO), rel=0.05)


def test_facts_of_models() -> None:
    def limits(name: str) -> tuple[int, int | None]:
        model = load_transformer(name)
        return model.expert_groups, model.group_limit

    assert limits("deepseek-v3") == limits("deepseek-r1") == (8, 4)
    assert limits("deepseek-v2") == (8, 3)
    assert limits("kimi-k2") == (1, 1)
    assert limits("deepseek-v2-lite") == limits("qwen3-235b-a22b") == (1, None)
    assert [name for name, recipe in RECIPES.items() if recipe.deduplicates and "nemo" in name]
    with pytest.raises(SpecError, match="experts=100 is not divisible by expert_groups=8"):
        load_transformer("deepseek-v3", experts=100)
    with pytest.raises(SpecError, match="group_limit=9 is more than expert_groups=8"):
        load_transformer("deepseek-v3", group_limit=9)

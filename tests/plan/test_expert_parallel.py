"""Expert parallelism in plans: their text, the search over its degrees, and the refusal of train."""

import pytest

from command import paceline, write_task
from paceline.cluster.published import parse as parse_cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.library import load_model
from paceline.plan.plan import Plan, parse, read_plan
from paceline.plan.search.best_plans import find_best_plans
from paceline.plan.search.constraints import parse_constraints
from paceline.plan.search.search import enumerate_splits, plan_of_split, search_plans

EXPERTS = 8  # of Mixtral 8x7B


def test_text_of_a_plan() -> None:
    plan = parse("zero1,tp=2,ep=4")
    assert (plan.ep, plan.resolve(16).dp, str(plan)) == (4, 8, "zero1,tp=2,ep=4")
    with pytest.raises(
        PlanError, match=r"ep=3 data ranks share the experts, which does not divide dp=8; use"
    ):
        parse("ep=3").resolve(8)


@pytest.mark.parametrize("ranks", [16, 64])
def test_search_finds_the_fastest_degree(ranks: int) -> None:
    """The best plan with ep is as fast as the best of all degrees that divide the experts, priced apart."""
    facts, cluster = load_model("mixtral-8x7b"), parse_cluster(f"h100:8x{ranks // 8}@50")
    found = search_plans(facts, cluster, 256)
    degrees = {plan.ep for plan, _ in found.fitting}
    assert degrees <= {1, 2, 4, 8}
    assert len(degrees) > 1
    best, cost = found.fitting[0]
    for plan, known in found.fitting[:5]:
        assert predict(facts, plan, cluster, 256).step_s == pytest.approx(known.step_s)
    alone = min(known.step_s for plan, known in found.fitting if plan.ep == 1)
    assert cost.step_s <= alone
    text = str(best)
    assert parse(text) == best


def test_more_experts_on_a_rank_need_more_memory() -> None:
    """A trillion parameters fit because ep divides the experts; without it, the same plan does not."""
    facts, cluster = load_model("deepseek-v3"), parse_cluster("h100:8x128@50")
    plan = Plan(zero=1, dp=64, pp=16, ep=64, microbatches=32, recompute="full")
    cost = predict(facts, plan, cluster, 2048)
    without = predict(facts, Plan(**{**vars(plan), "ep": 1}), cluster, 2048)
    assert without.peak_bytes > 3 * cost.peak_bytes


def test_models_without_experts_have_no_degrees() -> None:
    facts = load_model("llama3-8b")
    assert facts.experts == 1
    assert {split.ep for split in enumerate_splits(facts, 64, 8, 256)} == {1}
    with pytest.raises(PlanError, match="has none that are known; leave ep out"):
        find_best_plans(facts, parse_cluster("h100:8x8@50"), 256, "ep=8")
    assert load_model("mixtral-8x7b").experts == EXPERTS
    with pytest.raises(PlanError, match="ep=16 does not divide the experts of"):
        find_best_plans(load_model("mixtral-8x7b"), parse_cluster("h100:8x8@50"), 256, "ep=16")


def test_constraints_know_the_degree() -> None:
    facts, cluster = load_model("mixtral-8x7b"), parse_cluster("h100:8x2@50")
    found = search_plans(facts, cluster, 64, where=parse_constraints("ep=8"))
    assert {plan.ep for plan, _ in found.fitting} == {8}


def test_each_split_is_a_plan() -> None:
    splits = list(enumerate_splits(load_model("mixtral-8x7b"), 16, 8, 64))
    assert all(plan_of_split(split).resolve(16).ep == split.ep for split in splits)


def test_train_refuses_experts_in_parallel(tmp_path) -> None:
    says = "ep=2 can be predicted, but Paceline does not train experts in parallel; leave ep out"
    with pytest.raises(PlanError, match=says):
        read_plan("ddp,ep=2", 2, 8)
    write_task(tmp_path)
    for words in (("train", "--ranks", "2"), ("plan", "--ranks", "2"), ("preflight", "--ranks", "2")):
        done = paceline(words[0], "my.py:Regression", *words[1:], "--plan", "ddp,ep=2", at=tmp_path)
        assert done.status != 0, words
        assert "ep" in done.all
        assert "Traceback" not in done.all


def test_search_that_ends_early_has_the_best_bounds() -> None:
    """Without time, the search ends at the first plan that fits; with enough, it is the whole search."""
    facts, cluster = load_model("mixtral-8x7b"), parse_cluster("h100:8x4@50")
    whole = search_plans(facts, cluster, 128)
    patient, hasty = (search_plans(facts, cluster, 128, seconds=seconds) for seconds in (1e6, 1e-9))
    assert patient.skipped == whole.skipped == 0
    assert [cost.step_s for _, cost in patient.fitting] == [cost.step_s for _, cost in whole.fitting]
    assert len(hasty.fitting) == 1
    assert hasty.skipped + len(hasty.rejected) + 1 == len(whole.fitting) + len(whole.rejected)
    found = find_best_plans(facts, cluster, 128, search_s=1e-9)
    assert any("the search ended after" in note for note in found.assumed)

"""Search for plans: only legal plans, those that fit, fastest first."""

import pytest

from clusters import make_cluster
from paceline.cluster.published import parse as published
from paceline.errors import PlanError
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.predict import predict
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.model.library import load_model
from paceline.plan.model.transformer import Transformer
from paceline.plan.plan import parse
from paceline.plan.search.search import choose_plans, find_fastest, search_plans

TRILLION = Transformer(name="1t", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048, positions=2048)


@pytest.mark.parametrize(
    ("name", "devices", "batch"), [("llama3-8b", 16, 32), ("gpt2", 8, 24), ("resnet50", 4, 64)]
)
def test_every_plan_resolves_to_itself(name, devices, batch):
    found = search_plans(load_model(name), make_cluster(devices), batch)
    plans = [plan for plan, _ in found.fitting] + [rejected.plan for rejected in found.rejected]
    assert len(plans) == len(set(plans)) > 10
    for plan in plans[::7]:
        assert plan.resolve(devices) == plan
        assert parse(str(plan)) == plan
    costs = [(cost.step_s, cost.peak_bytes) for _, cost in found.fitting]
    assert costs == sorted(costs)
    assert all(cost.memory.fits(0.1) for _, cost in found.fitting)
    assert all(rejected.peak_bytes > 0.9 * 80 * 2**30 for rejected in found.rejected)


def test_search_and_predict_agree():
    facts, on = load_model("llama3-8b"), make_cluster(16)
    for plan, cost in choose_plans(facts, on, 32)[::100]:
        alone = predict(facts, plan, on, 32)
        assert (alone.step_s, alone.peak_bytes) == pytest.approx((cost.step_s, cost.peak_bytes), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "batch", "memory_GiB"), [("gpt3-1.3b", 64, 80), ("gpt3-1.3b", 96, 12), ("resnet50", 512, 80)]
)
def test_find_fastest_agrees_with_search(name, batch, memory_GiB):
    """Also with rates of another number of ranks that fill their nodes equally, as `scale` uses them."""
    facts, on = load_model(name), device_rates(make_cluster(64, memory_GiB=memory_GiB))
    for ranks in (8, 32):
        expected = search_plans(facts, make_cluster(ranks, memory_GiB=memory_GiB), batch).fitting[0]
        assert find_fastest(facts, on, ranks, batch) == expected


def test_find_fastest_without_fitting_plan():
    assert find_fastest(load_model("llama3-405b"), device_rates(make_cluster(8)), 8, 8) is None


def test_tp_stays_in_node():
    found = search_plans(load_model("llama3-8b"), make_cluster(16, of_a_node=4), 16)
    assert {plan.tp for plan, _ in found.fitting} == {1, 2, 4}


def test_small_model_is_not_split():
    plan, _ = choose_plans(load_model("gpt2"), make_cluster(8), 64)[0]
    assert (plan.tp, plan.pp, plan.cp) == (1, 1, 1)


def test_slow_links_change_choice():
    """Gathering weights in each step would cost more than it saves."""
    facts = load_model("llama3-8b")
    slow = choose_plans(facts, make_cluster(16, across_GBps=0.5), 16)[0][0]
    fast = choose_plans(facts, make_cluster(16, across_GBps=200), 16)[0][0]
    assert slow != fast
    assert slow.replicate > 1 or slow.pp > 1


def test_fewer_ranks_than_devices():
    found = search_plans(load_model("gpt2"), make_cluster(8), 8, ranks=2)
    assert {plan.resolve(2) for plan, _ in found.fitting} == {plan for plan, _ in found.fitting}


def test_rejected_plans_give_reason():
    found = search_plans(load_model("llama3-70b"), make_cluster(64), 64)
    assert found.fitting
    assert found.rejected
    assert "GiB" in found.rejected[-1].reason
    assert "most of it" in found.rejected[-1].reason


def test_no_fit_error():
    with pytest.raises(
        PlanError,
        match=r"no plan fits 72.0 GiB per device; the leanest, .* needs .* GiB: use \d+ ranks on \d+ nodes "
        r"of this kind",
    ):
        choose_plans(
            load_model("llama3-405b"),
            make_cluster(8).model_copy(update={"links": make_cluster(8).links[:1]}),
            8,
        )  # the network is unknown


@pytest.mark.parametrize(
    ("name", "memory_GiB", "ranks", "batch", "hint", "enough"),
    [
        ("llama3-8b", 80, 1, 8, "use --ranks 4", (4, 8)),
        ("gpt3-175b", 80, 8, 8, "use 64 ranks on 8 nodes of this kind", (64, 8)),
        ("resnet152", 0.2, 8, 8, "use 16 ranks on 2 nodes of this kind and a batch of 16", (16, 16)),
    ],
)
def test_hint_of_no_fit_error_works(name, memory_GiB, ranks, batch, hint, enough):
    with pytest.raises(PlanError, match=f": {hint}$"):
        choose_plans(load_model(name), make_cluster(8, memory_GiB=memory_GiB), batch, ranks=ranks)
    assert choose_plans(
        load_model(name), make_cluster(max(8, enough[0]), memory_GiB=memory_GiB), enough[1], ranks=enough[0]
    )


def test_indivisible_batch():
    with pytest.raises(PlanError, match="no plan splits a batch of 3"):
        choose_plans(load_model("resnet50"), make_cluster(8), 3)


def test_trillion_parameters_on_3072_devices():
    """benchmarks/search.py measures how long this takes."""
    found = search_plans(TRILLION.facts(), make_cluster(3072), 3072)
    assert found.fitting[0][0].tp == 8
    assert len(found.fitting) + len(found.rejected) > 5000


@pytest.mark.parametrize(
    ("words", "GBps"), [("h100:8x2", 50), ("a100-80g:8x2", 25), ("v100-32g:8x2", 25), ("h100:8x2@12", 12)]
)
def test_links_between_nodes_are_given_or_assumed(words, GBps):
    on, sentences = add_assumptions(published(words))
    assert next(link for link in on.links if link.axis == "across").beta_Bps.value == GBps * 1e9
    assert len(sentences) == ("@" not in words)

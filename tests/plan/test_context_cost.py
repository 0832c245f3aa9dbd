"""Predicted time and memory of context parallelism: rings, gathered keys and values, uneven slices."""

from dataclasses import replace

import pytest

import sequences
from clusters import make_cluster
from paceline import Spec
from paceline.plan.cost_model.framework_profiles import PACELINE
from paceline.plan.cost_model.memory import memory_breakdown
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit, assign_stages
from paceline.plan.model.facts import Attention, ModelFacts
from paceline.plan.model.library import load_transformer
from paceline.plan.search.search import enumerate_splits
from paceline.training.model_facts.describe import describe

LENGTH, RANKS = 4096, 4
SPLIT = WorkSplit(cp=RANKS, micro_batch=2)
HEADS, HEAD_DIM, LAYERS = 8, 64, 3


def build_facts(length: int = LENGTH, **changes: object) -> ModelFacts:
    """Return the facts of a GPT whose calls of attention have `changes`."""
    facts = load_transformer(
        "gpt3-175b", layers=LAYERS, hidden=HEADS * HEAD_DIM, heads=HEADS, vocab=512, seq=length
    ).facts()
    [(block, count)] = facts.runs
    block = replace(block, attention=tuple(replace(call, **changes) for call in block.attention))
    return replace(facts, runs=((block, count),))


def context_s(facts: ModelFacts, split: WorkSplit = SPLIT) -> float:
    found = predict_time(facts, split, PACELINE, device_rates(make_cluster(RANKS), ranks=RANKS))
    return next(part.value for part in found.parts if part.name == "context parallel")


def test_gathered_keys_are_sent_once_forward_and_their_gradients_once() -> None:
    rates = device_rates(make_cluster(RANKS), ranks=RANKS)
    size = 2 * 2 * LENGTH * HEADS * HEAD_DIM * 2  # samples, keys and values, bf16
    expected = LAYERS * sum(
        rates.collective_s(name, size, RANKS, rates.per_node) for name in ("all-gather", "reduce-scatter")
    )
    assert context_s(build_facts(masked=True)) == pytest.approx(expected)
    assert context_s(build_facts()) != pytest.approx(expected)
    again = LAYERS * rates.collective_s("all-gather", size, RANKS, rates.per_node)
    recomputed = replace(SPLIT, recompute="full")
    assert context_s(build_facts(masked=True), recomputed) == pytest.approx(expected + again)


@pytest.mark.parametrize("changes", [{"masked": True}, {"window": 512}], ids=["mask", "window"])
def test_gathered_keys_are_kept_until_the_backward_pass(changes: dict[str, object]) -> None:
    kept = []
    for facts in (build_facts(**changes), build_facts()):
        [assignment] = assign_stages(facts, 1, 1, even=True, folded=False)
        kept.append(memory_breakdown(facts, assignment, PACELINE, SPLIT.microbatch_key).activations)
    of_other_ranks = 2 * 2 * LENGTH * HEADS * HEAD_DIM * 2 * (RANKS - 1) / RANKS
    assert kept[0] - kept[1] == pytest.approx(LAYERS * of_other_ranks)


@pytest.mark.parametrize(
    ("call", "gathers", "imbalance"),
    [
        (Attention(1, 16, 16, 1), False, 1.0),
        (Attention(1, 20, 20, 1), False, 1.75),  # ranges of 5; the last sees 17.5 of 10 keys in the mean
        (Attention(1, 20, 20, 1, causal=False), False, 1.0),
        (Attention(1, 17, 17, 1), True, 5 / 4.25),
        (Attention(1, 16, 8, 1, causal=False), True, 1.0),
        (Attention(1, 16, 16, 1, window=16), False, 1.0),
        (Attention(1, 16, 16, 1, window=4), True, 1.0),
        (Attention(1, 16, 16, 1, masked=True), True, 1.0),
    ],
    ids=str,
)
def test_slices_of_four_ranks(call: Attention, gathers: bool, imbalance: float) -> None:
    assert call.gathers_keys(4) == gathers
    assert call.slice_imbalance(4) == pytest.approx(imbalance)
    assert call.gathered_elements(1) == 0


@pytest.mark.parametrize(
    ("kind", "masked"),
    [("nothing", False), ("causal mask", False), ("relative bias", True), ("padding", True)],
)
def test_masks_of_a_task_are_found(kind: str, masked: bool) -> None:
    facts = describe(Spec(task="text", batch=8), sequences.Variant(kind=kind))
    assert {call.masked for block, _ in facts.runs for call in block.attention} == {masked}


def test_plans_with_uneven_slices_are_proposed() -> None:
    assert any(split.cp == 2 for split in enumerate_splits(build_facts(17), 2, 2, 8))
    assert not any(split.cp == 2 for split in enumerate_splits(build_facts(3), 2, 2, 8))

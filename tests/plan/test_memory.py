"""Memory of a rank: closed forms of papers, and how each option changes it."""

from dataclasses import replace

import pytest

from paceline.plan.cost_model.framework_profiles import DEEPSPEED, FSDP, MEGATRON, PACELINE
from paceline.plan.cost_model.memory import memory_breakdown, params_on_rank, predict_memory, state_bytes
from paceline.plan.cost_model.work_split import WorkSplit, assign_stages
from paceline.plan.model.library import load_model, load_transformer

GPT3 = load_transformer("gpt3-175b").facts()
LLAMA = load_model("llama3-8b")


def parts(facts, split, recipe):
    return {part.name: part.value for part in predict_memory(facts, split, recipe, 80e9).parts}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, lambda n: 16), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n), (3, lambda n: 16 / n)],
)
@pytest.mark.parametrize("ranks", [1, 4, 64, 1024])
def test_zero_with_mixed_precision_matches_closed_form(zero, expected, ranks):
    """Rajbhandari et al. 2020, section 5: 2 + 2 + 12 bytes per parameter."""
    assert state_bytes(DEEPSPEED, zero, ranks).total == pytest.approx(expected(ranks), rel=1e-14)


def test_paceline_keeps_float32_and_shards_weights_at_rest_under_zero2():
    assert state_bytes(PACELINE, 0, 8).total == 16
    assert state_bytes(PACELINE, 1, 8).total == 8 + 8 / 8
    assert state_bytes(PACELINE, 2, 8) == state_bytes(PACELINE, 3, 8)
    assert state_bytes(PACELINE, 3, 8).total == 2


def test_state_of_gpt3_on_64_gpus():
    """arXiv 2205.05198, figure 1: 45.6 GiB with tp = pp = 8, 18 bytes per parameter, blocks only."""
    block = GPT3.runs[0][0]
    assert params_on_rank(block, 8) * 12 * 18 / 2**30 == pytest.approx(45.5625, rel=4e-4)  # biases and norms


@pytest.mark.parametrize(
    ("sequence", "recompute", "gib"),
    [(False, "none", 66.84375), (True, "selective", 12.3515625)],
)
def test_activations_of_gpt3_on_64_gpus(sequence, recompute, gib):
    """arXiv 2205.05198, figure 1: with 3 interleaved stages, rank 0 holds L·(1 + (p - 1)/(p·m)) blocks."""
    bare = replace(GPT3, first=replace(GPT3.first, saved={}), last=replace(GPT3.last, saved={}))
    split = WorkSplit(
        tp=8, pp=8, micro_batch=1, microbatches=64, schedule="interleaved", stages=3, recompute=recompute
    )
    found = parts(bare, split, replace(MEGATRON, sequence=sequence))
    assert found["activations"] / 2**30 == pytest.approx(gib, rel=1e-12)


def test_first_stage_keeps_more_than_last():
    split = WorkSplit(pp=8, micro_batch=1, microbatches=32, schedule="1f1b")
    blocks = replace(
        LLAMA,
        first=replace(LLAMA.first, params=0, split_params=0),
        last=replace(LLAMA.last, saved={}, products=(), params=0),
    )
    assert predict_memory(blocks, split, replace(PACELINE, even=True), 80e9).rank == 0


def test_gpipe_keeps_all_micro_batches_and_1f1b_one_per_stage():
    def kept(schedule, microbatches):
        return parts(
            LLAMA,
            WorkSplit(pp=4, micro_batch=1, microbatches=microbatches, schedule=schedule),
            replace(PACELINE, even=True),
        )["activations"]

    assert kept("gpipe", 16) == pytest.approx(4 * kept("1f1b", 16))
    assert kept("1f1b", 16) == kept("1f1b", 64)
    assert kept("gpipe", 4) == kept("1f1b", 4)


def test_memory_saved_by_each_option():
    base = WorkSplit(dp=8, micro_batch=2)
    whole = predict_memory(LLAMA, base, PACELINE, 80e9).peak_bytes
    for leaner in (
        replace(base, zero=1),
        replace(base, zero=3),
        replace(base, recompute="full"),
        replace(base, recompute="selective"),
    ):
        assert predict_memory(LLAMA, leaner, PACELINE, 80e9).peak_bytes < whole
    sizes = [
        predict_memory(LLAMA, replace(base, zero=3, recompute=how), PACELINE, 80e9).peak_bytes
        for how in ("full", "selective", "none")
    ]
    assert sizes == sorted(sizes)


def test_gathered_weights_of_two_blocks():
    found = parts(LLAMA, WorkSplit(dp=64, zero=3, micro_batch=1), FSDP)
    largest = max(params_on_rank(block, 1) for block, _ in LLAMA.parts())
    assert found["gathered"] == pytest.approx(2 * largest * FSDP.gather, rel=1e-4)


def test_whole_gradients_between_micro_batches():
    """FSDP2's set_requires_gradient_sync(False) keeps gradients whole."""
    few, many = (
        parts(
            LLAMA,
            WorkSplit(dp=8, zero=3, micro_batch=1, microbatches=microbatches, recompute="full"),
            PACELINE,
        )
        for microbatches in (1, 4)
    )
    assert many["gradients"] == LLAMA.params * 4
    assert few.get("gradients", 0.0) <= LLAMA.params * 4 / 8


def test_tied_weights_are_on_both_ends_of_pipeline():
    split = WorkSplit(pp=2, micro_batch=1, microbatches=4)
    facts = load_model("gpt2")
    first, last = assign_stages(facts, 2, 1, True, False)
    both = (
        memory_breakdown(facts, first, MEGATRON, split.microbatch_key).params
        + memory_breakdown(facts, last, MEGATRON, split.microbatch_key).params
    )
    assert both == facts.params + facts.shared_params


def test_parts_add_up_to_peak():
    found = predict_memory(LLAMA, WorkSplit(dp=8, zero=3, micro_batch=2), FSDP, 80e9)
    assert found.peak_bytes == pytest.approx(sum(part.value for part in found.parts))
    assert found.fits() is (found.peak_bytes <= 80e9)
    assert not found.fits(margin=0.99)
    assert 0 < found.error < 0.2


def test_run_that_was_out_of_memory_does_not_fit():
    """torchtitan, docs/performance.md: on 64 A100 of 80 GB, Llama 2 70B fits with full recompute only."""
    facts = load_model("llama2-70b")
    split = WorkSplit(dp=64, zero=3, micro_batch=2, recompute="selective")
    assert not predict_memory(facts, split, FSDP, 80 * 2**30).fits()
    assert predict_memory(facts, replace(split, recompute="full"), FSDP, 80 * 2**30).fits()

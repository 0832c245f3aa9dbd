"""Models with experts, latent attention and state spaces; adapters; products in 8 and 4 bits."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.published import find
from paceline.errors import PlanError, SpecError
from paceline.plan.cost_model.framework_profiles import NEMO, NEMO_FUSED, PACELINE
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.library import load_model, load_transformer
from published_row import ROW

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"
# billions of parameters, all and those that a token meets, as the authors state them
PUBLISHED = [
    ("qwen3-30b-a3b", 30.5, 3.3),
    ("qwen3-235b-a22b", 235, 22),
    ("deepseek-v2-lite", 15.7, 2.4),
    ("deepseek-v2", 236, 21),
    ("deepseek-v3", 671, 37),
    ("kimi-k2", 1027, 32),
    ("gpt-oss-20b", 20.9, 3.6),
    ("gpt-oss-120b", 116.8, 5.1),
    ("llama4-scout", 109, 17),
    ("llama4-maverick", 400, 17),
    ("grok-1", 314, 86),
    ("nemotron-3-nano", 31.6, 3.2),
    ("nemotron-3-super", 120.6, 12.7),
    ("glm-4.5-air", 106.9, 12.2),
    ("minimax-m2", 229, 10),
    ("dbrx", 132, 36),
    ("qwen2.5-72b", 72.7, 72.7),
    ("gemma3-27b", 27.0, 27.0),
    ("falcon-180b", 179, 179),
    ("nemotron-h-8b", 8.1, 8.1),
    ("nemotron-h-56b", 56, 56),
    ("nemotron4-15b", 15.6, 15.6),
    ("nemotron4-340b", 341, 341),
]


def time_parts(facts, split, recipe=PACELINE, cluster="h100:8x2@50"):
    cost = predict_time(facts, split, recipe, device_rates(find(cluster)))
    return {part.name: part.value for part in cost.parts}


def memory_parts(facts, split, recipe=PACELINE):
    return {part.name: part.value for part in predict_memory(facts, split, recipe, 1e15).parts}


@pytest.mark.parametrize(("name", "params", "active"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_parameters_are_those_of_the_checkpoint(name, params, active):
    facts = load_model(name)
    assert facts.params / 1e9 == pytest.approx(params, rel=0.012)
    products = sum(
        product.columns * product.inner * product.count * count
        for block, count in facts.parts()
        for product in block.products
    )
    assert products / 1e9 == pytest.approx(active, rel=0.1)  # some authors count the embedding, some do not


def test_flops_of_latent_attention():
    """arXiv 2405.04434, section 2.1, with the numbers of DeepSeek-V2: two FLOPs per weight and token."""
    facts = load_model("deepseek-v2")
    block = facts.runs[-1][0]
    down_q, up_q = 5120 * 1536, 1536 * 128 * (128 + 64)
    down_kv, up_kv, out = 5120 * (512 + 64), 512 * 128 * (128 + 128), 128 * 128 * 5120
    experts = 3 * 5120 * 1536 * (6 + 2)
    weights = down_q + up_q + down_kv + up_kv + out + experts
    assert block.product_flops == 2 * facts.tokens * weights
    keys_and_values = 2 * facts.tokens**2 * 128 * ((128 + 64) + 128)
    assert block.attention_flops == keys_and_values


def test_separate_operations_of_experts_take_time_unless_fused():
    """Megatron-Core adds biases expert by expert and clamps in operations of their own."""
    split = WorkSplit(dp=16, ep=16, micro_batch=1, microbatches=1)
    plain = load_model("gpt-oss-20b", bias=False, clamped=False)
    for recipe, slower in ((NEMO, 1.2), (NEMO_FUSED, 1.0)):
        times = [
            time_parts(facts, split, recipe)["other operations"]
            for facts in (load_model("gpt-oss-20b"), plain)
        ]
        assert times[0] >= slower * times[1]
        assert times[0] < 1.03 * times[1] or recipe is NEMO


def test_waiting_for_experts_stops_growing_but_for_those_of_a_rank():
    def other(experts, ep):
        facts = load_model("qwen3-30b-a3b", experts=experts, seq=256)
        return time_parts(facts, WorkSplit(dp=16, ep=ep), NEMO)["other operations"]

    assert other(128, 16) == pytest.approx(other(256, 16), rel=0.01)
    assert other(256, 1) > 1.5 * other(128, 1) > 1.5 * other(32, 1)


def test_native_attention_is_faster_on_hopper_only():
    facts, split = load_model("llama3-8b"), WorkSplit(dp=16)
    older = replace(NEMO, native_attention=False)
    for cluster, ratio in (("h100:8x2@50", 1.515 / 1.169), ("a100-80g:8x2@25", 1.0)):
        slow, fast = (time_parts(facts, split, recipe, cluster)["attention"] for recipe in (older, NEMO))
        assert slow / fast == pytest.approx(ratio)


def test_first_layers_and_every_second_layer_are_dense():
    assert [count for _, count in load_model("deepseek-v3").runs] == [3, 58]
    sparse = [
        block.expert_params > 0 for block, count in load_model("llama4-maverick").runs for _ in range(count)
    ]
    assert sparse == [False, True] * 24


def test_every_second_layer_sees_a_window():
    windows = [block.attention[0].window for block, _ in load_model("gpt-oss-120b").runs]
    assert windows == [128, None] * 18


def test_a_pattern_has_a_letter_per_layer():
    facts = load_model("nemotron-3-nano")
    assert sum(bool(block.expert_params) for block, count in facts.runs for _ in range(count)) == 23
    with pytest.raises(SpecError, match="pattern has 52 letters, and layers=12"):
        load_transformer("nemotron-3-nano", layers=12)
    with pytest.raises(SpecError, match="set state_heads"):
        load_transformer("gpt2", layers=2, pattern="M-")


def test_experts_are_divided_over_the_ranks_that_share_them():
    facts = load_model("qwen3-30b-a3b")
    alone, shared = WorkSplit(dp=8, recompute="full"), WorkSplit(dp=8, ep=8, recompute="full")
    experts = sum(block.expert_params * count for block, count in facts.parts())
    weights = memory_parts(facts, alone)["weights"] - memory_parts(facts, shared)["weights"]
    assert weights == pytest.approx(4 * experts * 7 / 8, rel=1e-9)
    # ZeRO shards the optimizer's state of experts over the ranks that have the same ones: none but itself
    sharded = WorkSplit(dp=8, ep=8, zero=1, recompute="full")
    moments = memory_parts(facts, sharded)["optimizer"]
    assert moments == pytest.approx(8 * ((facts.params - experts) / 8 + experts / 8), rel=1e-9)


def test_tokens_are_sent_to_experts_over_the_slowest_link_that_they_cross():
    facts = load_model("qwen3-30b-a3b")
    assert "expert parallel" not in time_parts(facts, WorkSplit(dp=16))
    node = time_parts(facts, WorkSplit(dp=16, ep=8))["expert parallel"]
    across = time_parts(facts, WorkSplit(dp=16, ep=16))["expert parallel"]
    assert across > node
    slower = time_parts(facts, WorkSplit(dp=16, ep=16), cluster="h100:8x2@12.5")["expert parallel"]
    assert slower > 3 * across
    # the least: each token once to the other node, forth and back, forward and backward
    tokens = facts.tokens * 2048 * 2 / 2
    assert across > 4 * 48 * tokens / 50e9


def test_all_products_of_experts_are_computed_whoever_has_them():
    facts = load_model("qwen3-30b-a3b")
    alone, shared = (time_parts(facts, WorkSplit(dp=8, ep=ep, micro_batch=8)) for ep in (1, 8))
    assert shared["products"] == pytest.approx(alone["products"], rel=0.1)


def test_adapters_need_no_gradients_of_weights():
    whole, adapted = (
        load_transformer("llama2-7b").facts(),
        load_transformer("llama2-7b", lora_rank=16).facts(),
    )
    trained = adapted.params - whole.params
    assert trained == 32 * 16 * (4096 + 3 * 4096)  # queries, keys and values (arXiv 2106.09685, section 4.2)
    split = WorkSplit(dp=8, recompute="none")
    full, lora = (time_parts(facts, split, NEMO) for facts in (whole, adapted))
    assert lora["products"] == pytest.approx(2 / 3 * full["products"], rel=0.05)
    assert lora["optimizer"] < 0.01 * full["optimizer"]
    assert lora["data parallel"] < full["data parallel"]
    memory = memory_parts(adapted, split)
    assert memory["optimizer"] == pytest.approx(8 * trained, rel=1e-9)
    assert memory["weights"] == pytest.approx(4 * adapted.params, rel=1e-9)


def test_flops_of_adapters_leave_out_gradients_of_frozen_weights():
    whole, adapted = (
        load_transformer("llama2-7b").facts(),
        load_transformer("llama2-7b", lora_rank=16).facts(),
    )
    attention = sum(block.attention_flops * count for block, count in whole.parts())
    products = whole.flops - attention
    assert adapted.training_flops == pytest.approx(3 * attention + 2 * products, rel=0.01)


def test_fewer_bits_are_faster_and_their_casts_cost_memory_traffic():
    facts, split = load_model("llama3-70b"), WorkSplit(dp=2, tp=4, pp=8, microbatches=8)
    parts = {
        dtype: time_parts(facts, split, replace(NEMO, dtype=dtype), "b200:8x8@50")
        for dtype in ("bf16", "fp8", "fp4")
    }
    assert parts["bf16"]["products"] > 1.5 * parts["fp8"]["products"] > 1.5 * parts["fp4"]["products"]
    assert parts["fp8"]["other operations"] > parts["bf16"]["other operations"]
    assert parts["fp8"]["attention"] == parts["bf16"]["attention"]  # attention stays in 16 bits
    with pytest.raises(PlanError, match=r"rate of a100-80g\S* in fp4 is unknown"):
        predict_time(facts, split, replace(NEMO, dtype="fp4"), device_rates(find("a100-80g:8x8@25")))


def test_context_and_buffers_count_as_parts_of_the_memory():
    facts = load_model("llama2-7b")
    one = memory_parts(facts, WorkSplit(recompute="full"), NEMO)
    many = memory_parts(facts, WorkSplit(dp=2, tp=2, pp=2, microbatches=2, recompute="full"), NEMO)
    assert one["process"] == NEMO.fixed_bytes
    assert many["process"] == NEMO.fixed_bytes + 3 * NEMO.connection_bytes
    assert "process" not in memory_parts(facts, WorkSplit(recompute="full"))


def test_rows_with_experts_adapters_and_few_bits(tmp_path):
    plain = ROW | {
        "gpu_type": "H100-80GB-SXM",
        "peak_TFLOPs_bf16": "989",
        "n_gpus": "64",
        "tp": "1",
        "pp": "1",
        "micro_batch": "1",
        "global_batch": "512",
        "recompute": "",
        "precision": "bf16",
        "source": "NeMo performance summary",
        "flops_convention": "model FLOPs",
    }
    unknown = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "n_params"), "")
    rows = [
        plain | unknown | {"row_id": "m#1", "model": "Qwen3_30B_a3B", "ep": "8", "seq_len": "4096"},
        plain
        | {
            "row_id": "m#2",
            "ep": "8",
            "experts": "64",
            "top_k": "4",
            "expert_ffn": "1024",
            "shared_experts": "1",
        }
        | {"hidden": "2048", "layers": "24", "heads": "16", "kv_heads": "16"},
        plain
        | {"row_id": "m#3", "model": "Llama2-7B", "hidden": "4096", "heads": "32", "kv_heads": "32"}
        | {"layers": "32", "ffn": "11008", "vocab": "32000", "lora_rank": "16"},
        plain
        | {"row_id": "m#4", "model": "Llama2-7B", "hidden": "4096", "heads": "32", "kv_heads": "32"}
        | {"layers": "32", "ffn": "11008", "vocab": "32000"},
        plain | unknown | {"row_id": "m#5", "model": "Llama 3.1 8B", "seq_len": "8192", "precision": "fp8"},
        plain | unknown | {"row_id": "m#6", "model": "No such model"},
    ]
    header = list(dict.fromkeys(key for row in rows for key in row))
    with (tmp_path / "m.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, header, restval="")
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "m.csv"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        row["row_id"]: row["predicted_step_time_s"] for row in json.loads((tmp_path / "out.json").read_text())
    }
    assert set(found) == {"m#1", "m#2", "m#3", "m#4", "m#5"}
    assert 0.5 < found["m#3"] / found["m#4"] < 0.85
    assert "not predicted: m#6: layers and hidden and heads are missing" in done.stdout

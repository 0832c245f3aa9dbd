"""Facts of models: exact numbers of parameters; FLOPs and kept activations by closed forms."""

import subprocess
import sys

import pytest

from paceline.errors import SpecError
from paceline.plan.cost_model.framework_profiles import PACELINE
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.facts import Attention, TensorVolume
from paceline.plan.model.library import list_models, load_model, load_transformer

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "efficientnet-b0": 5_288_548,
    "efficientnet-b4": 19_341_616,
    "efficientnet-b7": 66_347_960,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_match_published_checkpoint(name):
    assert load_model(name).params == PARAMETERS[name]


def test_gpt3_has_175_billion_parameters():
    assert load_model("gpt3-175b").params == pytest.approx(175e9, rel=0.003)
    assert set(PARAMETERS) <= set(list_models())


def test_gpt_flops_match_narayanan_et_al():
    """arXiv 2104.04473, equation 3, without recomputation: 72·B·s·l·h²·(1 + s/6h + V/12lh)."""
    m = load_transformer("gpt3-175b")
    layers, h, s, v = m.layers, m.hidden, m.seq, m.vocab
    assert m.facts().training_flops == pytest.approx(
        72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)), rel=1e-12
    )


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12.9e9), ("mixtral-8x22b", 39.1e9)])
def test_memory_counts_all_experts_and_flops_active_experts(name, active):
    """Published: 12.9 of 46.7 and 39.1 of 140.6 billion parameters see a token.

    Each costs two FLOPs, except embedding, norms and router.
    """
    m, facts = load_transformer(name), load_model(name)
    products = sum(block.product_flops * count for block, count in facts.parts()) / (2 * m.seq)
    other_params = m.vocab * m.hidden + (2 * m.layers + 1) * m.hidden + m.layers * m.hidden * m.experts
    assert products + other_params == pytest.approx(active, rel=2e-3)
    idle = facts.params - products - other_params
    [(block, layers)] = facts.runs
    assert idle == layers * block.expert_params * (m.experts - m.active_experts) / m.experts
    cut = WorkSplit(tp=2, recompute="full")
    [weights] = [
        part.value for part in predict_memory(facts, cut, PACELINE, 1e15).parts if part.name == "weights"
    ]
    assert weights == pytest.approx(4 * facts.params / 2, rel=1e-3)


def test_active_experts_cost_as_much_as_dense_model():
    dense = load_transformer("llama2-7b", kv_heads=8, ffn=2 * 14336, seq=8192).facts()
    assert load_model("mixtral-8x7b").flops == dense.flops
    assert load_model("mixtral-8x7b").params > 3 * dense.params


def test_convnet_flops():
    assert load_model("resnet50").flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert load_model("efficientnet-b0").flops == pytest.approx(2 * 0.39e9, rel=0.02)


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute", "core", "expected"),
    [
        (1, False, "none", True, lambda a, s, h, t: 34 + 5 * a * s / h),
        (8, False, "none", True, lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (8, True, "none", True, lambda a, s, h, t: 34 / t + 5 * a * s / (h * t)),
        (8, False, "none", False, lambda a, s, h, t: 10 + 24 / t),
        (8, True, "none", False, lambda a, s, h, t: 34 / t),
        (8, False, "full", False, lambda a, s, h, t: 2),
    ],
)
def test_kept_activations_match_korthikanti_et_al(tp, sequence, recompute, core, expected):
    """arXiv 2205.05198, table 2; selective recompute omits the core of attention there."""
    m = load_transformer("gpt3-175b")
    block = m.facts().runs[0][0]
    found = block.saved[recompute].bytes(2, 2, tp, sequence) + (block.core.bytes(2, 2, tp) if core else 0)
    assert found == pytest.approx(m.seq * m.hidden * expected(m.heads, m.seq, m.hidden, tp), rel=1e-12)


def test_loss_keeps_four_bytes_per_logit():
    """arXiv 2205.05198, section 4.3: 4·s·b·h·(1 + v/h) for the last norm, the head and the logits."""
    m = load_transformer("gpt3-175b")
    assert m.facts().last.saved["none"].bytes(2, 2) == 4 * m.seq * m.hidden * (1 + m.vocab / m.hidden)


def test_tp_degrees():
    assert load_model("llama3-8b").tp_degrees == (1, 2, 4, 8)
    assert load_model("resnet50").tp_degrees == (1,)
    assert TensorVolume(1, 2, 3, 4, 5).bytes(4, 2, 1) == 4 + 4 + 6 + 4 + 5


def test_masked_pairs():
    assert Attention(1, 10, 10, 1).seen == 0.5
    assert Attention(1, 10, 10, 1, causal=False).seen == 1
    assert Attention(1, 8192, 8192, 1, window=4096).seen == 0.5 * 0.75


def test_model_from_toml_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('like = "llama3-8b"\nlayers = 16\n')
    found = load_model(str(file))
    assert (found.name, found.blocks) == ("mine", 16)
    file.write_text("layers = 2\nhidden = 64\nheads = 4\nvocab = 256\nseq = 128\n")
    assert load_model(str(file)).params == 256 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers = 2\n", "lacks hidden, heads, vocab, seq"),
        ('like = "llama3-8b"\nlayer = 3\n', "did you mean layers"),
        ('like = "llama9"\n', "did you mean llama"),
        ('like = "llama3-8b"\nheads = 5\n', "not divisible by heads=5"),
        ("=", "is not TOML"),
    ],
)
def test_bad_model_file(tmp_path, text, says):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=says):
        load_model(str(file))


def test_unknown_model_suggests_nearest():
    with pytest.raises(SpecError, match="did you mean llama3-70b"):
        load_model("llama3-70")
    with pytest.raises(SpecError, match="is not a transformer"):
        load_model("resnet50", seq=3)


def test_library_does_not_import_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, paceline.plan.model.library; print('torch' in sys.modules)"],
        capture_output=True,
    )
    assert done.stdout.strip() == b"False"

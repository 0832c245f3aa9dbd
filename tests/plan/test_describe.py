"""What is counted on a module agrees with what is worked out for a transformer of the same numbers."""

import pytest
import torch
from torch import nn

from paceline import Task
from paceline.errors import TaskError
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.work_split import split_work
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.transformer import Transformer
from paceline.plan.plan import parse
from paceline.spec import Spec
from paceline.tasks.digits import Digits
from paceline.tasks.text import Text
from paceline.training.model_facts.describe import count_facts, describe, describe_model
from paceline.training.model_facts.op_counter import OpCounter

SIZES = {"layers": 3, "hidden": 32, "heads": 4, "seq": 16, "positions": 16}


def assert_agree(found: ModelFacts, expected: ModelFacts) -> None:
    assert found.params == expected.params
    assert found.shared_params == expected.shared_params
    assert found.flops == pytest.approx(expected.flops, rel=0.01)
    [(block, count)], [(same, layers)] = found.runs, expected.runs
    assert (block.params, count) == (same.params, layers)
    assert block.product_flops == pytest.approx(same.product_flops)
    assert block.attention_flops == same.attention_flops
    assert block.boundary == same.boundary
    assert (found.first.params, found.last.params) == (expected.first.params, expected.last.params)
    assert (found.tokens, found.hidden, found.tp_degrees) == (
        expected.tokens,
        expected.hidden,
        expected.tp_degrees,
    )
    assert found.first.boundary == expected.first.boundary


class Gpt2(Task):
    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=48, n_embd=32, n_layer=3, n_head=4, n_positions=16, use_cache=False, **drop)
        )

    def loss(self, output: object, batch: torch.Tensor) -> torch.Tensor:
        return output.logits.flatten(0, 1).logsumexp(-1)  # type: ignore[attr-defined]


def test_text() -> None:
    found = describe(Spec(task="text"), Text(width=32, depth=3, heads=4, context=16))
    assert_agree(found, Transformer(vocab=256, tied=False, **SIZES).facts())
    assert found.source == "counted"
    assert found.runs[0][0].sums == 2
    assert found.first.sums == 1


def test_gpt2_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    task = Gpt2()
    with torch.device("meta"):
        model = task.model()
    found = describe_model(model, task, torch.zeros(2, 16, dtype=torch.long), 2)
    assert_agree(found, Transformer(vocab=48, **SIZES).facts())


def test_a_wider_model_does_not_agree() -> None:
    found = describe(Spec(task="text"), Text(width=64, depth=3, heads=4, context=16))
    with pytest.raises(AssertionError):
        assert_agree(found, Transformer(vocab=256, tied=False, **SIZES).facts())


def test_saved_for_backward_agrees_with_the_closed_form() -> None:
    found = describe(Spec(task="text"), Text(width=32, depth=3, heads=4, context=16))
    expected = Transformer(vocab=256, tied=False, **SIZES).facts()
    counted, worked_out = (facts.runs[0][0].saved["none"].bytes(4, 4) for facts in (found, expected))
    assert counted == pytest.approx(worked_out, rel=0.1)


def test_a_convolution() -> None:
    found = describe(Spec(task="digits"), Digits())
    assert found.params == sum(p.numel() for p in Digits().model().parameters())
    assert found.flops > 0
    assert found.tokens == 1


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


class Choice(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(Choosy())

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().mean(-1)


def test_a_model_that_looks_at_values_is_named() -> None:
    with torch.device("meta"):
        model = Choice().model()
    with pytest.raises(
        TaskError,
        match=r"Choice cannot be described: 0 fails without values: .*; use paceline plan --measure",
    ):
        describe_model(model, Choice(), torch.zeros(2, 4), 2)


def test_a_model_that_looks_at_values_is_counted_in_a_real_pass() -> None:
    model = Choice().model()
    found = count_facts(OpCounter(model, Choice(), {}), Choice(), torch.zeros(3, 4), 3)
    assert (found.params, found.flops) == (20, 2 * 4 * 4)


def test_operations_are_counted_by_kind() -> None:
    block = describe(Spec(task="text"), Text(width=32, depth=1, heads=4, context=16)).runs[0][0]
    found = {(one.kind, one.size): one.count for one in block.operations if one.kind != "view"}
    assert found["function", 2 * 4 * 32 * 16] == 1  # GELU reads and writes four times the width of 16 tokens
    assert (
        found["norm", 2 * 32 * 16 + 2 * 16 + 2 * 32 / 3] == 2
    )  # with mean and deviation of each token, and its weights for 3 samples
    assert found["move", 3 * 32 * 16] == 2  # the residual sums
    assert block.tensors == 16
    first = describe(Spec(task="digits"), Digits()).runs[0][0].products[0]
    assert (first.convolution, first.first) == (True, True)


def test_tensors_without_values_live_as_real_ones_do() -> None:
    task = Text(width=32, depth=3, heads=4, context=16)
    expected = describe(Spec(task="text"), task)
    torch.manual_seed(0)
    tokens = torch.randint(256, (3, 16))
    real = count_facts(OpCounter(task.model(), task, {}), task, (tokens, tokens), 3)
    pairs = [
        (one.lives, same.lives) for (one, _), (same, _) in zip(expected.parts(), real.parts(), strict=True)
    ]
    assert all(one is not None and one == pytest.approx(same, rel=0.01) for one, same in pairs)
    block = expected.runs[0][0]
    assert block.lives is not None
    assert block.lives.kept == pytest.approx(
        block.saved["none"].bytes(4, 4)
    )  # what autograd saves is what lives on
    assert block.lives.most > 1.1 * block.lives.kept  # with gradients beside it


def peak_bytes(facts: ModelFacts, plan: str, ranks: int, part: str) -> float:
    found = predict_memory(facts, split_work(parse(plan), ranks, 8), FLOAT32, 0.0)
    return {one.name: one.value for one in found.parts}.get(part, 0.0)


def test_what_lies_outside_of_the_blocks_is_whole_under_cp() -> None:
    """The same samples on two ranks: whole ones, or half of each."""
    facts = describe(Spec(task="text", batch=8), Text())
    whole, half = (peak_bytes(facts, plan, 2, "activations") for plan in ("dp=2", "cp=2"))
    logits = 4 * 8 / 2 * 128 * 256  # bytes of the half that the other rank would have
    assert whole + logits < half < whole + 5 * logits


def test_gradients_that_wait_for_those_of_weights_take_memory() -> None:
    facts = describe(Spec(task="text", batch=8), Text())
    plain, split_backward = (
        peak_bytes(facts, f"pp=2,pp_schedule={name}", 2, "activations")
        for name in ("interleaved", "zero-bubble")
    )
    assert 1.1 * plain < split_backward < 1.5 * plain

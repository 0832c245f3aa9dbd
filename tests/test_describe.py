"""What is counted on a module agrees with what is worked out for a transformer of the same numbers."""

import pytest
import torch
from torch import nn

from paceline import Task
from paceline.errors import TaskError
from paceline.plan.facts import ModelFacts
from paceline.plan.transformer import Transformer
from paceline.spec import Spec
from paceline.tasks.text import Text
from paceline.training.describe import describe, described

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
    assert (found.tokens, found.hidden, found.tp_degrees) == (expected.tokens, expected.hidden, expected.tp_degrees)
    assert found.first.boundary == expected.first.boundary


class Gpt2(Task):
    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=3, n_head=4, n_positions=16, use_cache=False, **drop))

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
    found = described(model, task, torch.zeros(2, 16, dtype=torch.long), 2)
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
    from paceline.tasks.digits import Digits

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
    with pytest.raises(TaskError, match="Choice cannot be described: 0 fails without values"):
        described(model, Choice(), torch.zeros(2, 4), 2)

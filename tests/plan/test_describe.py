"""Facts counted on a module agree with those computed for a transformer of the same sizes."""

import pytest
import torch
from torch import nn

from paceline import Task
from paceline.after_step import Ema, StepOperation
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


def assert_agree(counted_facts: ModelFacts, expected: ModelFacts) -> None:
    assert counted_facts.params == expected.params
    assert counted_facts.shared_params == expected.shared_params
    assert counted_facts.flops == pytest.approx(expected.flops, rel=0.01)
    [(block, count)], [(same, layers)] = counted_facts.runs, expected.runs
    assert (block.params, count) == (same.params, layers)
    assert block.product_flops == pytest.approx(same.product_flops)
    assert block.attention_flops == same.attention_flops
    assert block.boundary == same.boundary
    assert (counted_facts.first.params, counted_facts.last.params) == (
        expected.first.params,
        expected.last.params,
    )
    assert (counted_facts.tokens, counted_facts.hidden, counted_facts.tp_degrees) == (
        expected.tokens,
        expected.hidden,
        expected.tp_degrees,
    )
    assert counted_facts.first.boundary == expected.first.boundary


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
    counted_facts = describe(Spec(task="text"), Text(width=32, depth=3, heads=4, context=16))
    assert_agree(counted_facts, Transformer(vocab=256, tied=False, **SIZES).facts())
    assert counted_facts.source == "counted"
    assert counted_facts.runs[0][0].sums == 2
    assert counted_facts.first.sums == 1


def test_gpt2_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    task = Gpt2()
    with torch.device("meta"):
        model = task.model()
    counted_facts = describe_model(model, task, torch.zeros(2, 16, dtype=torch.long), 2)
    assert_agree(counted_facts, Transformer(vocab=48, **SIZES).facts())


def test_wider_model_does_not_agree() -> None:
    counted_facts = describe(Spec(task="text"), Text(width=64, depth=3, heads=4, context=16))
    with pytest.raises(AssertionError):
        assert_agree(counted_facts, Transformer(vocab=256, tied=False, **SIZES).facts())


def test_saved_for_backward_agrees_with_the_closed_form() -> None:
    counted_facts = describe(Spec(task="text"), Text(width=32, depth=3, heads=4, context=16))
    expected = Transformer(vocab=256, tied=False, **SIZES).facts()
    counted, closed_form = (facts.runs[0][0].saved["none"].bytes(4, 4) for facts in (counted_facts, expected))
    assert counted == pytest.approx(closed_form, rel=0.1)


def test_convolution() -> None:
    counted_facts = describe(Spec(task="digits"), Digits())
    assert counted_facts.params == sum(p.numel() for p in Digits().model().parameters())
    assert counted_facts.flops > 0
    assert counted_facts.tokens == 1


class ValueDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


class ValueDependentTask(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(ValueDependent())

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().mean(-1)


def test_model_that_needs_values_is_refused() -> None:
    with torch.device("meta"):
        model = ValueDependentTask().model()
    with pytest.raises(
        TaskError,
        match=r"ValueDependentTask cannot be described: 0 fails without values: .*; use paceline plan "
        r"--measure-compute",
    ):
        describe_model(model, ValueDependentTask(), torch.zeros(2, 4), 2)


def test_model_that_needs_values_is_counted_in_a_real_pass() -> None:
    model = ValueDependentTask().model()
    counted_facts = count_facts(
        OpCounter(model, ValueDependentTask(), {}), ValueDependentTask(), torch.zeros(3, 4), 3
    )
    assert (counted_facts.params, counted_facts.flops) == (20, 2 * 4 * 4)


def test_operations_are_counted_by_kind() -> None:
    block = describe(Spec(task="text"), Text(width=32, depth=1, heads=4, context=16)).runs[0][0]
    counts = {(op.kind, op.size): op.count for op in block.operations if op.kind != "view"}
    # GELU reads and writes four times the width of 16 tokens.
    assert counts["function", 2 * 4 * 32 * 16] == 1
    assert (
        counts["norm", 2 * 32 * 16 + 2 * 16 + 2 * 32 / 3] == 2
    )  # with mean and deviation of each token, and its weights for 3 samples
    assert counts["move", 3 * 32 * 16] == 2  # the residual sums
    assert block.tensors == 16
    first = describe(Spec(task="digits"), Digits()).runs[0][0].products[0]
    assert (first.convolution, first.first) == (True, True)


def test_live_memory_is_equal_with_and_without_values() -> None:
    task = Text(width=32, depth=3, heads=4, context=16)
    expected = describe(Spec(task="text"), task)
    torch.manual_seed(0)
    tokens = torch.randint(256, (3, 16))
    real = count_facts(OpCounter(task.model(), task, {}), task, (tokens, tokens), 3)
    pairs = [
        (fake.lives, measured.lives)
        for (fake, _), (measured, _) in zip(expected.parts(), real.parts(), strict=True)
    ]
    assert all(fake is not None and fake == pytest.approx(measured, rel=0.01) for fake, measured in pairs)
    block = expected.runs[0][0]
    assert block.lives is not None
    assert block.lives.kept == pytest.approx(
        block.saved["none"].bytes(4, 4)
    )  # live tensors are those that autograd saved
    assert block.lives.most > 1.1 * block.lives.kept  # plus gradients


def peak_bytes(facts: ModelFacts, plan: str, ranks: int, part: str) -> float:
    memory = predict_memory(facts, split_work(parse(plan), ranks, 8), FLOAT32, 0.0)
    return {part.name: part.value for part in memory.parts}.get(part, 0.0)


class AveragedText(Text):
    def after_step(self) -> list[StepOperation]:
        return [Ema(0.9, params="blocks.*")]


def test_moving_averages_are_sharded_like_the_weights() -> None:
    spec, task = Spec(task="text", batch=8), AveragedText()
    facts, plain = describe(spec, task), describe(spec, Text())
    averaged = sum(
        parameter.numel() for name, parameter in task.model().named_parameters() if name.startswith("blocks.")
    )
    assert averaged > 0
    for plan, shards in (("ddp", 1), ("zero1", 1), ("zero3", 4)):
        part = peak_bytes(facts, plan, 4, "averaged weights")
        assert part == pytest.approx(4 * averaged / shards)
        assert peak_bytes(plain, plan, 4, "averaged weights") == 0


def test_logits_are_whole_under_cp() -> None:
    """The same samples on two ranks: whole samples, or half of each sample."""
    facts = describe(Spec(task="text", batch=8), Text())
    whole, half = (peak_bytes(facts, plan, 2, "activations") for plan in ("dp=2", "cp=2"))
    logits = 4 * 8 / 2 * 128 * 256  # bytes of the other rank's half
    assert whole + logits < half < whole + 5 * logits


def test_split_backward_takes_more_memory() -> None:
    facts = describe(Spec(task="text", batch=8), Text())
    plain, split_backward = (
        peak_bytes(facts, f"pp=2,pp_schedule={name}", 2, "activations")
        for name in ("interleaved", "zero-bubble")
    )
    assert 1.1 * plain < split_backward < 1.5 * plain


class Frozen(Text):
    """A decoder of which only the last block and the head are trained."""

    frozen: bool = True

    def model(self) -> nn.Module:
        model = super().model()
        for name, parameter in model.named_parameters():
            is_trained = f".{self.depth - 1}." in name or name.startswith(("head", "norm"))
            parameter.requires_grad_(is_trained or not self.frozen)
        return model


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    """Only trained parameters have gradients and the state of AdamW, as real tensors show."""
    spec, fields = Spec(task="text"), {"width": 32, "depth": 3, "heads": 4, "context": 16}
    frozen_task, whole_task = Frozen(**fields), Frozen(**fields, frozen=False)
    frozen, whole = describe(spec, frozen_task), describe(spec, whole_task)
    model = frozen_task.model()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert 0 < trained < whole.params / 2
    assert whole.frozen_params == 0  # negative control
    assert frozen.params == whole.params
    assert frozen.params - frozen.frozen_params == pytest.approx(trained)
    # the products of gradients of weights of two blocks: 12 · width² parameters each, for 16 positions
    assert whole.training_flops - frozen.training_flops == 2 * (12 * 32**2) * 2 * 16

    batch = torch.zeros(2, 16, dtype=torch.long)
    model(batch).sum().backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    of_frozen, of_whole = (
        {
            part.name: part.value
            for part in predict_memory(facts, split_work(parse("ddp"), 2, 2), FLOAT32, 1e9).parts
        }
        for facts in (frozen, whole)
    )
    assert of_frozen["weights"] == of_whole["weights"] == pytest.approx(4 * whole.params)
    assert of_frozen["optimizer"] == pytest.approx(sum(4 * tensor.numel() for tensor in tensors))
    assert of_whole["optimizer"] == pytest.approx(8 * whole.params)
    # DDP keeps all gradients, and for a moment those of a block twice
    real = sum(4 * tensor.numel() for tensor in gradients)
    assert real <= of_frozen["gradients"] <= 2 * real < 4 * whole.params <= of_whole["gradients"]

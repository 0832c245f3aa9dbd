"""Tests of tensor parallelism: styles found in models, and equality with the training of one process."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import models
from harness import TrainingResult, differences, ranks, train_on_ranks, train_on_this_rank
from paceline import Layout, Spec, Task
from paceline.errors import PlanError, TaskError
from paceline.parallel.tensor import apply as tensor
from paceline.parallel.tensor import linear as layers
from paceline.parallel.tensor.apply import Splits, find_splits
from paceline.parallel.tensor.styles import STYLES
from paceline.plan.plan import ResolvedPlan, parse
from paceline.spec import Optimizer
from paceline.tasks.digits import Digits

pytestmark = pytest.mark.processes

SPEC = Spec(
    batch=8, steps=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, clip=0.5, weight_decay=0.1)
)  # not Adam, which divides rounding errors by themselves


class Attention(nn.Module):
    """Attention whose number of heads follows from the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.join((q * self.scale @ k.transpose(-1, -2)).softmax(-1) @ v))


class FixedHeads(Attention):
    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 4, 4).transpose(1, 2)


class FixedHeadCount(Attention):
    """With half of the features this runs with heads of half the size: a wrong result without an error."""

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), 5, 4, -1).transpose(1, 2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ComputedWeights(Gated):
    """Weights that parametrizations compute; that of spectral_norm changes its buffers in each pass."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.gate)
        weight_norm(self.up, dim=1)
        spectral_norm(self.down)


class ComputedWeightsInTurn(Gated):
    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.gate)
        spectral_norm(self.up)
        weight_norm(self.down)


class DropoutInBoth(Gated):
    """Dropout in split features and in whole activations."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.3)), 0.3) + self.down(F.dropout(self.up(x), 0.3))


class UsesWeightOutside(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.weight.sum()


class MixesFeatures(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class LearnedFactor(Gated):
    """A learned factor for each feature that would be split."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.factor)


class Sequences(Task):
    kind: str = "Attention"
    tensor: dict[str, str] | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), globals()[self.kind](), nn.LayerNorm(16), nn.Linear(16, 3))

    def dataset(self, split: str) -> models.Pairs | None:
        return (
            models.Pairs(x=models.random_normal(29, 5, 6), y=models.random_normal(29, 5, 3, seed=1))
            if split == "train"
            else None
        )

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def layout(self) -> Layout:
        return Layout(tensor=self.tensor)


class Normed(models.NormedImages):
    """BatchNorm counts the samples of the data ranks, not those of all ranks."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(144, 8),
            nn.Tanh(),
            nn.Linear(8, 7),
        )


class Encoder(Sequences):
    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Linear(6, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
        )


class HuggingFace(models.Text):
    kind: str = "llama"

    def model(self) -> nn.Module:
        from transformers import (
            GPT2Config,
            GPT2LMHeadModel,
            LlamaConfig,
            LlamaForCausalLM,
            Qwen3Config,
            Qwen3ForCausalLM,
        )

        sizes = {
            "vocab_size": 12,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "head_dim": 4,
            "use_cache": False,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
        if self.kind == "gpt2":
            off = {
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "use_cache": False,
                "bos_token_id": 0,
                "eos_token_id": 1,
            }
            return Logits(
                GPT2LMHeadModel(
                    GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=4, n_positions=16, **off)
                )
            )
        if self.kind == "qwen3":
            return Logits(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)))
        return Logits(
            LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=self.kind == "llama-tied"))
        )

    def inputs(self, batch: Any) -> Any:
        return batch["tokens"][:, :-1]


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def find_task_splits(task: Task, tp: int = 2) -> Splits:
    from paceline.data.fake import example_batch
    from paceline.training.init.deferred_init import record

    model, _, _ = record(task.model, 0)
    plan = ResolvedPlan(tp=tp)
    return find_splits(model, task, example_batch(SPEC, task, plan), plan)


@pytest.mark.parametrize(
    ("kind", "styles"),
    [
        ("Attention", {"1.q": "column", "1.k": "column", "1.v": "column", "1.o": "row"}),
        ("Gated", {"1.gate": "column", "1.up": "column", "1.down": "row"}),
        (
            "FixedHeads",
            {"1.q": "row", "1.k": "row", "1.v": "row", "1.o": "gather"},
        ),  # pairs with the layer before it
        ("FixedHeadCount", {"1.q": "row", "1.k": "row", "1.v": "row", "1.o": "gather"}),
        ("ComputedWeights", {"1.gate": "column", "1.up": "column", "1.down": "row"}),
        ("MixesFeatures", {"1.up": "row", "1.down": "gather"}),
        ("LearnedFactor", {"1.up": "row", "1.down": "gather"}),
        ("UsesWeightOutside", {"1.gate": "gather", "1.down": "gather"}),
    ],
)
def test_find_splits_styles(kind: str, styles: dict[str, str]) -> None:
    found = find_task_splits(Sequences(kind=kind)).styles
    assert {name: style for name, style in found.items() if name.startswith("1.")} == styles
    assert "3" not in found  # it has 3 features


def test_partial_parameters() -> None:
    assert find_task_splits(Sequences(kind="Attention")).partial == {"1.scale"}
    assert find_task_splits(Sequences(kind="ComputedWeights")).partial == {
        f"1.{layer}.parametrizations.weight.{key}"
        for layer, keys in (("gate", (0, 1)), ("up", (0, 1)), ("down", ("",)))
        for key in (f"original{number}" for number in keys)
    }


def test_note_names_layers_that_are_not_split_in_pairs() -> None:
    notes = find_task_splits(Sequences(kind="FixedHeads")).notes
    assert notes[0] == "tp: *.k, *.q, *.v cannot be split in pairs, because the forward fixes their sizes"
    assert "3 not split" in notes[-1]


def test_layout_overrides_found_styles() -> None:
    found = find_task_splits(Sequences(kind="Gated", tensor={"1.*": "whole"})).styles
    assert found == {"0": "gather"}


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (
            {"1.upp": "column"},
            TaskError,
            "layout().tensor: no such module: '1.upp'; did you mean 1.up?",
        ),
        ({"1.up": "colum"}, TaskError, "layout().tensor['1.up'] is 'colum'; did you mean column?"),
        ({"2": "column"}, TaskError, "layout().tensor['2'] is 'column', which does not apply to a LayerNorm"),
        ({"3": "column"}, PlanError, "tp=2 does not divide the 3 features of 3"),
    ],
)
def test_invalid_layout(tensor: dict[str, str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        find_task_splits(Sequences(kind="Gated", tensor=tensor))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("task", "tp", "message"),
    [
        (Sequences(), 3, "tp=3 does not divide the 4 heads of 1.q; use tp=2 or 4"),
        (Sequences(kind="Gated"), 16, "tp=16 does not divide the 24 features of 1.gate; use tp=2 or 3 or 4"),
        (models.Points(), 2, "tp=2 does not divide the 7 features of 0; use tp=7"),
    ],
)
def test_indivisible_sizes(task: Task, tp: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_task_splits(task, tp)
    assert str(caught.value) == message


TASKS: list[Task] = [
    models.ShortText(),
    Digits(width=4),
    Sequences(),
    Normed(),
    Sequences(kind="FixedHeads"),
    Encoder(),
    *(HuggingFace(kind=kind) for kind in ("llama", "llama-tied", "gpt2", "qwen3")),
    Sequences(tensor={"1.*": "whole"}),  # the scale of its heads is whole too
    Sequences(kind="ComputedWeights"),
    Sequences(kind="ComputedWeightsInTurn"),
]
# Normed, llama-tied and ComputedWeights do the same and more
RARER = (
    Digits(width=4),
    *(HuggingFace(kind=kind) for kind in ("llama", "gpt2", "qwen3")),
    Sequences(kind="ComputedWeightsInTurn"),
)
PLANS = [(2, "tp=2"), (4, "tp=2"), (4, "tp=2,zero=2"), (4, "tp=2,zero=3,microbatches=2")]


def skip_without_transformers(task: Task) -> None:
    if isinstance(task, HuggingFace):
        pytest.importorskip("transformers")


@cache
def reference(at: int, plan: str = "single") -> TrainingResult:
    return train_on_ranks(1, TASKS[at], SPEC, plan)


CASES = [
    pytest.param(
        at,
        *plan,
        id=f"{type(task).__name__}-{getattr(task, 'kind', '')}-{plan[0]}-{plan[1]}",
        marks=[pytest.mark.slow] if task in RARER or plan != PLANS[0 if at else -1] else [],
    )
    for at, task in enumerate(TASKS)
    for plan in PLANS
]


@pytest.mark.parametrize(("at", "size", "plan"), CASES)
def test_trains_as_one_process(at: int, size: int, plan: str) -> None:
    skip_without_transformers(TASKS[at])
    # BatchNorm computes its statistics over a micro-batch, and spectral_norm iterates in each.
    depends = isinstance(TASKS[at], Normed) or getattr(TASKS[at], "kind", "").startswith("Computed")
    count = parse(plan).microbatches
    single_plan = f"single,microbatches={count}" if depends and count else "single"
    assert not differences(train_on_ranks(size, TASKS[at], SPEC, plan), reference(at, single_plan), 1e-11)


def test_dropout_is_equal_on_shared_tensors() -> None:
    """`trained` compares the ranks: with different masks their weights would differ at once."""
    drops = Sequences(kind="DropoutInBoth")
    found = train_on_ranks(2, drops, SPEC, "tp=2")
    assert found.losses != train_on_ranks(1, Sequences(kind="Gated"), SPEC).losses
    assert not differences(train_on_ranks(4, drops, SPEC, "tp=4"), found, 1.0)


def is_loss_split(task: Task, plan: str) -> bool:
    heads: list[nn.Module] = []
    original = STYLES["head"]

    def build_forward(module: Any, *rest: Any) -> Any:
        heads.append(module)
        return original.build_forward(module, *rest)

    STYLES["head"] = dataclasses.replace(original, build_forward=build_forward)
    train_on_this_rank(task, SPEC, plan)
    STYLES["head"] = original
    return all(getattr(head, layers.SPLIT_LOSS) for head in heads) and bool(heads)


@pytest.mark.parametrize(("task", "split"), [(TASKS[0], True), (Sequences(), False)])
def test_cross_entropy_over_split_vocabulary(task: Task, split: bool) -> None:
    assert ranks(2)(is_loss_split, task, "tp=2") == [split] * 2


class PlainLoss(models.ShortText):
    """A loss whose own operation takes plain tensors only."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if type(output) is not Tensor:
            raise TypeError("scores must be a plain tensor")
        return super().loss(output, batch)


def test_loss_that_needs_the_whole_output_is_reported() -> None:
    found = train_on_ranks(2, PlainLoss(), SPEC, "tp=2")
    assert not differences(found, train_on_ranks(1, PlainLoss(), SPEC), 1e-10)
    [note] = [note for note in found.notes if note.startswith("tp: loss()")]
    assert note.endswith("gathered on each rank (TypeError: scores must be a plain tensor)")


class NoSumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def omit_backward_sum(task: Task, plan: str) -> TrainingResult:
    original, layers._EnterSplitLinear = layers._EnterSplitLinear, NoSumInBackward  # type: ignore[misc]
    try:
        return train_on_this_rank(task, SPEC, plan)
    finally:
        layers._EnterSplitLinear = original  # type: ignore[misc]


def omit_partial_sum(task: Task, plan: str) -> TrainingResult:
    original, tensor.sum_partial_gradients = tensor.sum_partial_gradients, lambda *arguments: None
    try:
        return train_on_this_rank(task, SPEC, plan)
    finally:
        tensor.sum_partial_gradients = original


@pytest.mark.parametrize("fault", [omit_backward_sum, omit_partial_sum])
def test_omitted_sum_is_detected(fault: Callable[..., TrainingResult]) -> None:
    assert differences(ranks(2)(fault, TASKS[2], "tp=2")[0], reference(2), 1e-4)


def test_omitted_sum_of_computed_weights_is_detected() -> None:
    at = TASKS.index(Sequences(kind="ComputedWeights"))
    assert differences(ranks(2)(omit_partial_sum, TASKS[at], "tp=2")[0], reference(at), 1e-4)

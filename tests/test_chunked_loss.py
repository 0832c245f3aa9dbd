"""Cross entropy in chunks: values, gradients, memory, and trainings that equal those with whole logits."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from faults import replaced
from harness import ranks, train_on_ranks, train_on_this_rank
from paceline import Spec
from paceline.chunked_loss import (
    CHUNK_ELEMENTS,
    CrossEntropyHead,
    LossOptions,
    VocabularyPart,
    chunked_cross_entropy,
)
from paceline.cluster.published import find
from paceline.data.fake import example_batch, fake_parameters
from paceline.errors import TaskError
from paceline.parallel.loss.forward import call_loss, call_model
from paceline.parallel.tensor import linear
from paceline.plan.cost_model.compute_time import compute_block_time
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.traced_memory import peak_bytes
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer
from paceline.tasks.lm import Lm
from paceline.training.model_facts.describe import describe
from paceline.training.model_facts.live_memory import LiveMemory, measure_live_memory
from paceline.training.model_facts.model_analysis import build_meta_model

ROWS, CLASSES, WIDTH = 37, 19, 8


def draw(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    return [*tensors[:2], tensors[2] if bias else None]


def targets() -> Tensor:
    found = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    found[5] = found[20] = -100
    return found


def differentiate(losses: Tensor, tensors: list[Any]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, ROWS, dtype=losses.dtype)
    return [losses, *torch.autograd.grad((losses * weights).sum(), [t for t in tensors if t is not None])]


OPTIONS = [LossOptions(), LossOptions(label_smoothing=0.1), LossOptions(z_loss=0.02), LossOptions(0.3, 0.01)]


def compute_whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the losses by torch, with whole logits."""
    logits = F.linear(hidden, weight, bias)
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=options.label_smoothing)
    return losses + options.z_loss * logits.exp().sum(-1).log().square() * (targets != -100)


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_smoothed_targets_and_z_loss(options: LossOptions) -> None:
    hidden, weight, own = tensors = draw(torch.float64, True)
    found = differentiate(chunked_cross_entropy(hidden, weight, targets(), own, 5, options=options), tensors)
    expected = differentiate(compute_whole(hidden, weight, targets(), own, options), tensors)
    plain = differentiate(compute_whole(hidden, weight, targets(), own, LossOptions()), tensors)
    for one, other, without in zip(found, expected, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(one, without)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to 1, got -0.1"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"z_loss": math.inf}, "z_loss must be a number, at least 0, got inf"),
    ],
)
def test_bad_options_of_the_head(options: dict[str, float], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        CrossEntropyHead(WIDTH, CLASSES, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, ROWS, None])
def test_losses_and_gradients_are_those_of_torch(rows: int | None, bias: bool) -> None:
    hidden, weight, own = tensors = draw(torch.float64, bias)
    found = differentiate(chunked_cross_entropy(hidden, weight, targets(), own, rows), tensors)
    expected = differentiate(
        F.cross_entropy(F.linear(hidden, weight, own), targets(), reduction="none"), tensors
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_wrong_target_is_caught() -> None:
    hidden, weight, own = tensors = draw(torch.float64, False)
    found = differentiate(chunked_cross_entropy(hidden, weight, targets().roll(1), own, 5), tensors)
    expected = differentiate(F.cross_entropy(F.linear(hidden, weight), targets(), reduction="none"), tensors)
    assert not torch.allclose(found[1], expected[1])


def test_autocast() -> None:
    hidden, weight, _ = tensors = draw(torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiate(chunked_cross_entropy(hidden, weight, targets(), None, 5), tensors)
        expected = differentiate(
            F.cross_entropy(F.linear(hidden, weight).float(), targets(), reduction="none"), tensors
        )
    assert found[0].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


@pytest.mark.parametrize("is_chunked", [True, False])
def test_no_tensor_has_all_logits(is_chunked: bool) -> None:
    hidden, weight, _ = draw(torch.float32, False)
    with Largest() as largest:
        if is_chunked:
            losses = chunked_cross_entropy(hidden, weight, targets(), None, 4)
        else:
            losses = F.cross_entropy(F.linear(hidden, weight), targets(), reduction="none")
        losses.sum().backward()
    assert (largest.elements >= ROWS * CLASSES) != is_chunked


def test_head_without_targets_returns_logits() -> None:
    head = CrossEntropyHead(WIDTH, CLASSES)
    hidden = torch.randn(2, 3, WIDTH)
    assert torch.equal(head(hidden), F.linear(hidden, head.weight, head.bias))
    assert head(hidden, torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
    assert isinstance(head, nn.Linear)
    with pytest.raises(TaskError, match="one target per row"):
        head(hidden, torch.zeros(2, 4, dtype=torch.int64))


SPEC = Spec(batch=8, steps=3, optimizer=Optimizer(lr=0.01), precision="fp64", profile=False)
SIZES = {"width": 16, "depth": 2, "heads": 2, "context": 16, "vocabulary": 301}  # uneven parts


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a text of 60 short documents."""
    path = tmp_path_factory.mktemp("text") / "documents.txt"
    path.write_text("".join(f"document {number} has {'words ' * (number % 7)}\n" for number in range(60)))
    return str(path)


@cache
def train(text: str, is_chunked: bool, size: int, plan: str) -> Any:
    return train_on_ranks(size, Lm(file=text, **SIZES, chunked_loss=is_chunked), SPEC, plan)


def without_other_ranks() -> Any:
    """Let each rank keep the sums of its own classes."""
    return replaced(linear, "VocabularyPart", lambda part: lambda *args: replace(part(*args), combine=keep))


def keep(sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    return sums, picked


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "tp=2"),
        *(
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in (
                (1, "single"),
                (2, "ddp,microbatches=2"),
                (2, "zero1"),
                (2, "zero2"),
                (2, "zero3"),
                (4, "hsdp"),
                (2, "pp=2,microbatches=2"),
                (2, "cp=2"),
                (4, "dp=2,tp=2"),
                (4, "dp=2,tp=2,zero=3"),
                (4, "pp=2,tp=2,microbatches=2"),
                (4, "cp=2,tp=2"),
            )
        ),
    ],
)
def test_trainings_equal_those_with_whole_logits(size: int, plan: str, text: str) -> None:
    whole, chunked = train(text, False, 1, "single"), train(text, True, size, plan)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-10)
    assert chunked.grad_norms == pytest.approx(whole.grad_norms, rel=1e-10)
    for name, weights in whole.weights.items():
        assert chunked.weights[name] == pytest.approx(weights, rel=1e-8, abs=1e-10), name
    assert chunked.metrics == [pytest.approx(found, rel=1e-8) for found in whole.metrics]
    assert "head" not in " ".join(note for note in chunked.notes if "not split" in note)


@pytest.mark.processes
def test_losses_of_the_own_classes_are_caught(text: str) -> None:
    task = Lm(file=text, **SIZES, chunked_loss=True)
    found = ranks(2)(train_on_this_rank, task, SPEC, "tp=2", without_other_ranks)
    assert found[0].losses != pytest.approx(train(text, False, 1, "single").losses, rel=1e-3)


LARGE = {"width": 2, "depth": 1, "heads": 1, "context": 32, "vocabulary": 2**20}


@cache
def describe_large(is_chunked: bool) -> ModelFacts:
    return describe(Spec(task="lm"), Lm(**LARGE, chunked_loss=is_chunked))


def trace_head(is_chunked: bool, samples: int) -> LiveMemory:
    """Return the memory of the head in a pass of `samples` samples without values."""
    task = Lm(**LARGE, chunked_loss=is_chunked)
    model = build_meta_model(Spec(task="lm"), task).model
    batch = example_batch(Spec(task="lm", batch=samples), task, ResolvedPlan())
    with fake_parameters(model) as imagine:
        inputs = imagine(batch)
        _, _, head = measure_live_memory(
            model, list(model.blocks), lambda: call_loss(task, call_model(task, model, inputs), inputs)
        )
    return head


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_planned_memory(is_chunked: bool, samples: int) -> None:
    planned = peak_bytes(
        FLOAT32,
        describe_large(is_chunked).last,
        MicrobatchKey(1, 1, 1, micro_batch=samples, recompute="none"),
    )
    assert planned == pytest.approx(trace_head(is_chunked, samples).most, rel=0.05)
    assert (planned < 1.1 * 4 * CHUNK_ELEMENTS) == is_chunked


def test_planned_work() -> None:
    chunked, whole = describe_large(True), describe_large(False)
    assert (chunked.params, chunked.flops, chunked.vocab) == (whole.params, whole.flops, whole.vocab)
    [product] = chunked.last.products
    assert (product.rows, product.columns, product.cut) == (32, 2**20, "columns")
    key = MicrobatchKey(1, 1, 1, micro_batch=8, recompute="none")
    rates = device_rates(find("h100:8"))
    times = [compute_block_time(rates, FLOAT32, facts.last, key) for facts in (chunked, whole)]
    assert [time.recompute_flops for time in times] == [8 * product.flops, 0]
    assert [time.recompute_s for time in times] == [pytest.approx(times[0].products_s), 0]


def split_cross_entropy(parts: int, is_combined: bool, options: LossOptions) -> list[Tensor]:
    """Return the losses and gradients of ranks that divide the classes, one after another."""
    hidden, weight, bias = tensors = draw(torch.float64, True)
    width = -(-CLASSES // parts)
    known: list[tuple[Tensor, Tensor]] = []

    def keep_own(sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        known.append((sums, picked))
        return sums, picked

    def combine(sums: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        own, others = zip(*known, strict=True)
        return torch.stack(own).logsumexp(0), torch.stack(others).sum(0)

    def run(combine: Any) -> list[Tensor]:
        return [
            chunked_cross_entropy(
                hidden,
                weight[begin : begin + width],
                targets(),
                bias[begin : begin + width],
                5,
                VocabularyPart(begin, CLASSES, combine),
                options,
            )
            for begin in range(0, CLASSES, width)
        ]

    first = run(keep_own)
    losses = run(combine) if is_combined else first
    return [losses[0], *differentiate(torch.stack(losses).sum(0), tensors)[1:]]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_combined", [True, False])
def test_classes_of_several_ranks(is_combined: bool, options: LossOptions) -> None:
    hidden, weight, bias = tensors = draw(torch.float64, True)
    expected = differentiate(compute_whole(hidden, weight, targets(), bias, options), tensors)
    for parts in (2, 3, 4):
        found = split_cross_entropy(parts, is_combined, options)
        is_same = [
            torch.allclose(one, other, rtol=1e-12, atol=1e-12)
            for one, other in zip(found, expected, strict=True)
        ]
        assert all(is_same) if is_combined else not any(is_same)


def test_classes_that_are_excluded() -> None:
    hidden, weight, bias = draw(torch.float64, True)
    with torch.no_grad():
        bias[9:] = -math.inf  # a rank may have no other classes
        chosen = targets().clamp(max=8)
        expected = F.cross_entropy(F.linear(hidden, weight, bias), chosen, reduction="none")
        assert chunked_cross_entropy(hidden, weight, chosen, bias, 5).allclose(expected)
        part = VocabularyPart(9, CLASSES, lambda sums, picked: (sums, picked))
        found = chunked_cross_entropy(hidden, weight[9:], chosen, bias[9:], 5, part)
    assert found.eq(-math.inf).logical_or(chosen.eq(-100)).all()


@pytest.mark.parametrize("wrong", [CLASSES, -1])
@pytest.mark.parametrize("part", [None, VocabularyPart(5, CLASSES, keep)], ids=["whole", "part"])
def test_targets_that_are_no_class(part: VocabularyPart | None, wrong: int) -> None:
    hidden, weight, _ = draw(torch.float32, False)
    chosen = targets()
    chosen[3] = wrong
    with pytest.raises(IndexError):
        chunked_cross_entropy(hidden, weight, chosen, None, 5, part)

"""Tests of context parallelism: it trains as one process, and refuses models that it cannot split."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import models
import sequences
from command import paceline
from faults import replaced
from harness import (
    differences,
    differences_from_single,
    ranks,
    relative_difference,
    train_on_ranks,
    train_on_this_rank,
)
from paceline import Spec, Task, train
from paceline.errors import PlanError
from paceline.events import Step
from paceline.parallel.context import apply as context
from paceline.parallel.context import ring_attention
from paceline.parallel.context.ring_attention import RingAttention, rank_positions
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save, Schedule
from paceline.tasks import text

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
RTOL = 1e-10
ADAMW = Optimizer(name="adamw", lr=1e-2, weight_decay=0.1, clip=0.5)
# Not Adam: it divides the gradient of a bias of the keys, which is 0 but for rounding, by itself.
SGD = Optimizer(name="sgd", lr=0.05, weight_decay=0.1)


def make_spec(optimizer: Optimizer = ADAMW, **more: Any) -> Spec:
    """Return a spec whose steps cross the end of an epoch."""
    schedule = Schedule(name="cosine", warmup=12, floor=0.1)
    return Spec(
        **{
            "steps": 5,
            "batch": 8,
            "seed": 3,
            "precision": "fp64",
            "optimizer": optimizer,
            "schedule": schedule,
            **more,
        }
    )


PLANS = [
    (2, "cp=2"),
    (2, "zero1,cp=2"),
    (4, "cp=4,recompute=selective"),
    (4, "dp=2,cp=2"),
    (4, "zero2,dp=2,cp=2,microbatches=2"),
    (4, "hsdp,dp=2,cp=2"),
    *(
        pytest.param(size, plan, marks=SLOW)
        for size, plan in (
            (2, "zero2,cp=2,microbatches=2"),
            (2, "zero3,cp=2"),
            (2, "cp=2,microbatches=2,recompute=full"),
            (4, "zero3,cp=4,recompute=full"),
        )
    ),
]


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_gpt_trains_as_one_process(size: int, plan: str) -> None:
    assert not differences_from_single(size, plan, models.Text(), make_spec())


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        pytest.param(2, "cp=2", marks=SLOW),
        (2, "zero3,cp=2,microbatches=2,recompute=full"),
        pytest.param(4, "dp=2,cp=2", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(sequences.Encoder(), marks=SLOW),
        sequences.Encoder(mask="causal"),
        pytest.param(sequences.Encoder(batch_first=False, mask="causal"), marks=SLOW),
        pytest.param(sequences.Variant(kind="nothing"), marks=SLOW),
        pytest.param(sequences.Variant(kind="causal mask"), marks=SLOW),
        sequences.Sequential(),
        sequences.Llama(),
        pytest.param(sequences.Gpt2(), marks=SLOW),
    ],
    ids=str,
)
def test_models_train_as_one_process(task: Task, size: int, plan: str) -> None:
    if isinstance(task, sequences.Llama):
        pytest.importorskip("transformers")
    assert not differences_from_single(size, plan, task, make_spec(SGD))


def test_text_task_with_evaluation(tmp_path: Path) -> None:
    """The evaluation divides its samples among the ranks; its last batch is short."""
    file = tmp_path / "text"
    file.write_text("Riders in a paceline take turns at the front. " * 20)
    task = text.Text(file=str(file), width=16, depth=2, heads=2, context=16)
    spec = make_spec(SGD, evaluate_every=2)
    for size, plan in ((2, "cp=2"), (4, "zero3,dp=2,cp=2")):
        assert not differences_from_single(size, plan, task, spec)


def test_bf16() -> None:
    spec = make_spec(precision="bf16")
    found, expected = (
        train_on_ranks(size, models.Text(), spec, plan) for size, plan in ((2, "cp=2"), (1, "single"))
    )
    assert not differences(found, expected, 0.02)


def test_dropout_outside_of_blocks_is_equal() -> None:
    """Outside of the blocks the ranks of a sequence have equal masks; `trained` compares them.

    Inside of them each rank has a private stream.
    """
    found = train_on_ranks(2, sequences.Variant(kind="dropout"), make_spec(), "cp=2")
    assert (
        relative_difference(
            found.losses, train_on_ranks(2, sequences.Variant(kind="nothing"), make_spec(), "cp=2").losses
        )
        > 1e-3
    )


def compare_attention(length: int, is_causal: bool, dtype: torch.dtype) -> list[float]:
    """Return how far output and three gradients of ring attention are from whole attention on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    draw = torch.Generator().manual_seed(1)
    query, key, value, grad = (
        torch.randn(3, heads, length, 6, generator=draw, dtype=dtype) for heads in (4, 2, 2, 4)
    )
    positions = rank_positions(length, mesh.get_local_rank(), mesh.size())
    whole = [tensor.requires_grad_() for tensor in (query, key, value)]
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*whole, **options)
    local = [tensor.detach().index_select(2, positions).requires_grad_() for tensor in whole]
    found = RingAttention(mesh, parse("cp=2"))(*local, **options)
    pairs = zip(
        [found, *torch.autograd.grad(found, local, grad[:, :, positions])],
        [expected, *torch.autograd.grad(expected, whole, grad)],
        strict=True,
    )
    return [relative_difference(part.detach(), full.detach()[:, :, positions]) for part, full in pairs]


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), 4])
def test_ring_equals_attention(size: int) -> None:
    for length in (4 * size, 3 * size):  # two chunks on each rank, or one
        for is_causal in (True, False):
            for dtype, rtol in ((torch.float64, 1e-14), (torch.float32, 4e-6)):
                assert all(
                    max(errors) < rtol for errors in ranks(size)(compare_attention, length, is_causal, dtype)
                )


def record_batch_sizes(task: text.Text, spec: Spec) -> list[int]:
    """Return the batch size of each pass of the model."""
    sizes: list[int] = []

    def record(original: Any) -> Any:
        def forward(self: text.Gpt, tokens: torch.Tensor) -> torch.Tensor:
            sizes.append(len(tokens))
            return original(self, tokens)

        return forward

    train_on_this_rank(task, spec, "cp=2", lambda: replaced(text.Gpt, "forward", record))
    return sizes


def test_trial_pass_uses_few_samples(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Riders in a paceline take turns at the front. " * 20)
    sizes = ranks(2)(
        record_batch_sizes,
        text.Text(file=str(tmp_path / "text"), width=16, depth=2, heads=2, context=16),
        make_spec(steps=2),
    )[0]
    assert max(sizes[: sizes.index(8)]) == context.TRIAL_SAMPLES


@contextmanager
def local_attention() -> Iterator[None]:
    """Let each slice attend only to itself."""
    original = RingAttention.__call__
    RingAttention.__call__ = lambda self, *tensors, **options: F_ATTENTION(*tensors, **options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RingAttention.__call__ = original  # type: ignore[method-assign]


F_ATTENTION = F.scaled_dot_product_attention


@contextmanager
def plant_unchecked_local_attention() -> Iterator[None]:
    """Local attention without a comparison of outputs."""
    with (
        replaced(context.ContextParallel, "_find_difference", lambda original: lambda *_: None),
        local_attention(),
    ):
        yield


def plant_missing_factor() -> Any:
    """Do not multiply the gradient of a slice by the number of ranks that share the sequence."""
    return replaced(
        ring_attention.GatherSlices,
        "backward",
        lambda original: staticmethod(
            lambda ctx, grad: (original(ctx, grad)[0] / ctx.ranks, None, None, None)
        ),
    )


@pytest.mark.parametrize("fault", [plant_unchecked_local_attention, plant_missing_factor])
def test_faults_are_detected(fault: Any) -> None:
    for plan in ("cp=2", "zero3,cp=2"):
        assert differences_from_single(2, plan, models.Text(), make_spec(), fault)


def train_and_return_error(task: Task, plan: str, fault: Any = None, **more: Any) -> str:
    with pytest.raises(PlanError) as raised:
        train_on_this_rank(task, make_spec(SGD, **more), plan, *([] if fault is None else [fault]))
    return str(raised.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (models.Points(), "Sequential calls no F.scaled_dot_product_attention in its blocks"),
        (
            sequences.Variant(kind="explicit attention"),
            "VariantGpt calls no F.scaled_dot_product_attention in its blocks",
        ),
        (sequences.Variant(kind="multihead"), "nn.MultiheadAttention does with need_weights=False"),
        (
            sequences.Variant(kind="convolution"),
            "blocks.0 (VariantBlock) mixes, numbers or masks positions outside of "
            "scaled_dot_product_attention",
        ),
        (sequences.Variant(kind="mean"), "blocks.0 (VariantBlock) mixes, numbers or masks positions"),
        (
            sequences.Variant(kind="rotary inside"),
            "blocks.0 (VariantBlock) mixes, numbers or masks positions",
        ),
        (
            sequences.Variant(kind="cumulative between"),
            "the output of VariantGpt with its blocks on slices of the sequence differs",
        ),
        (
            sequences.Variant(kind="stored results"),
            "the output of VariantGpt with its blocks on slices of the sequence differs",
        ),
        (
            sequences.Variant(kind="attention dropout"),
            "ring attention does not support dropout, got a probability of 0.1; set it to 0",
        ),
        (
            sequences.Encoder(mask="banded"),
            "encoder.layers.0 (TransformerEncoderLayer) mixes, numbers or masks positions",
        ),
        (
            sequences.Variant(kind="window"),
            "ring attention requires a causal mask or none, got a mask of shape (8, 8)",
        ),
        (
            sequences.Ragged(),
            "sequences of 7 positions are not divisible by cp=2; cut them to 6, or use a plan without cp",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [pytest.param("cp=2", marks=SLOW), "zero3,cp=2"])
def test_impossible_splits_are_refused(plan: str, task: Task, message: str) -> None:
    """Each rank raises the error, so that none waits for another."""
    for error in ranks(2)(train_and_return_error, task, plan):
        assert message in error


def test_local_attention_changes_the_output() -> None:
    for error in ranks(2)(train_and_return_error, models.Text(), "cp=2", local_attention):
        assert "the output of Gpt with its blocks on slices of the sequence differs" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["text", "--set", "context=30", "--plan", "cp=4"],
            "sequences of 30 positions are not divisible by cp=4; cut them to 28, or use cp=2",
        ),
        (["digits", "--plan", "cp=4"], "calls no F.scaled_dot_product_attention in its blocks"),
        (
            ["{tests}/sequences.py:Encoder", "--set", "dropout=0.1", "--plan", "cp=4"],
            "ring attention does not support dropout, got a probability of 0.1",
        ),
    ],
)
def test_refused_before_ranks_start(words: list[str], message: str, tmp_path: Path) -> None:
    words = [word.format(tests=Path(sequences.__file__).parent) for word in words]
    result = paceline("train", *words, "--ranks", "4", "--batch", "8", "--run-dir", "r", at=tmp_path)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "r").exists()


def steps(spec: Spec, plan: str, run: Path) -> list[float]:
    return [
        event.loss
        for event in train(spec, parse(plan), task=models.Text(), run=RunFolder(run))
        if isinstance(event, Step)
    ]


RESUMPTIONS = [
    pytest.param((2, "cp=2"), (2, "cp=2"), marks=SLOW),
    pytest.param((2, "cp=2"), (2, "ddp"), marks=SLOW),
    pytest.param((2, "zero3"), (4, "dp=2,cp=2"), marks=SLOW),
    ((4, "zero3,cp=4"), (1, "single")),
]


@pytest.mark.parametrize(("before", "after"), RESUMPTIONS)
def test_resume_under_another_plan(before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    def losses(at: tuple[int, str], until: int, run: str) -> list[float]:
        (tmp_path / run).mkdir(exist_ok=True)
        spec = make_spec(steps=until, schedule=Schedule(), save=Save(every=2, minutes=float("inf")))
        return ranks(at[0])(steps, spec, at[1], tmp_path / run)[0]

    found = losses(before, 2, "stopped") + losses(after, 5, "stopped")
    assert relative_difference(found, losses(after, 5, "through")) <= (RTOL if before != after else 0)

"""A sequence that is split over ranks trains as a whole one does; what cannot be split is refused, not trained otherwise."""

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
from harness import difference, differences, ranks, trained, training, wrong
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

RTOL = 1e-10
ADAMW = Optimizer(name="adamw", lr=1e-2, weight_decay=0.1, clip=0.5)
SGD = Optimizer(
    name="sgd", lr=0.05, weight_decay=0.1
)  # Adam divides the gradient of a bias of the keys, which is 0, by itself


def wanted(optimizer: Optimizer = ADAMW, **more: Any) -> Spec:
    """Steps over the border of an epoch."""
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
    *[
        (2, plan)
        for plan in (
            "cp=2",
            "zero1,cp=2",
            "zero2,cp=2,microbatches=2",
            "zero3,cp=2",
            "cp=2,microbatches=2,recompute=full",
        )
    ],
    *[
        (4, plan)
        for plan in (
            "cp=4,recompute=selective",
            "dp=2,cp=2",
            "zero3,cp=4,recompute=full",
            "zero2,dp=2,cp=2,microbatches=2",
        )
    ],
    (4, "hsdp,dp=2,cp=2"),
]


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_a_gpt(size: int, plan: str) -> None:
    assert not wrong(size, plan, models.Text(), wanted())


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "cp=2"),
        (2, "zero3,cp=2,microbatches=2,recompute=full"),
        pytest.param(4, "dp=2,cp=2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "task",
    [
        sequences.Encoder(),
        sequences.Encoder(mask="causal"),
        sequences.Encoder(batch_first=False, mask="causal"),
        sequences.Odd(what="nothing"),
        sequences.Odd(what="causal mask"),
        sequences.Sequential(),
        sequences.Llama(),
        sequences.Gpt2(),
    ],
    ids=str,
)
def test_models(task: Task, size: int, plan: str) -> None:
    if isinstance(task, sequences.Llama):
        pytest.importorskip("transformers")
    assert not wrong(size, plan, task, wanted(SGD))


def test_the_text_task(tmp_path: Path) -> None:
    """With an evaluation, whose samples are not those of each rank; its last batch is short."""
    file = tmp_path / "text"
    file.write_text("Riders in a paceline take turns at the front. " * 20)
    task = text.Text(file=str(file), width=16, depth=2, heads=2, context=16)
    spec = wanted(SGD, evaluate_every=2)
    for size, plan in ((2, "cp=2"), (4, "zero3,dp=2,cp=2")):
        assert not wrong(size, plan, task, spec)


def test_bf16() -> None:
    spec = wanted(precision="bf16")
    found, expected = (
        trained(size, models.Text(), spec, plan) for size, plan in ((2, "cp=2"), (1, "single"))
    )
    assert not differences(found, expected, 0.02)


def test_dropout_agrees_where_it_must() -> None:
    """Around the blocks the ranks of a sequence drop the same; `trained` holds them against each other. In them each has a stream
    of its own."""
    found = trained(2, sequences.Odd(what="dropout"), wanted(), "cp=2")
    assert difference(found.losses, trained(2, sequences.Odd(what="nothing"), wanted(), "cp=2").losses) > 1e-3


def attention_here(length: int, is_causal: bool, dtype: torch.dtype) -> list[float]:
    """How far the ring is from whole attention on this rank: output and three gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    draw = torch.Generator().manual_seed(1)
    query, key, value, grad = (
        torch.randn(3, heads, length, 6, generator=draw, dtype=dtype) for heads in (4, 2, 2, 4)
    )
    here = rank_positions(length, mesh.get_local_rank(), mesh.size())
    whole = [of.requires_grad_() for of in (query, key, value)]
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*whole, **options)
    mine = [of.detach().index_select(2, here).requires_grad_() for of in whole]
    found = RingAttention(mesh, parse("cp=2"))(*mine, **options)
    pairs = zip(
        [found, *torch.autograd.grad(found, mine, grad[:, :, here])],
        [expected, *torch.autograd.grad(expected, whole, grad)],
        strict=True,
    )
    return [difference(one.detach(), other.detach()[:, :, here]) for one, other in pairs]


@pytest.mark.parametrize("size", [2, 4])
def test_the_ring_is_attention(size: int) -> None:
    for length in (4 * size, 3 * size):  # a head and a tail on each rank, and one piece
        for is_causal in (True, False):
            for dtype, rtol in ((torch.float64, 1e-14), (torch.float32, 4e-6)):
                assert all(max(far) < rtol for far in ranks(size)(attention_here, length, is_causal, dtype))


def rows_seen(task: text.Text, spec: Spec) -> list[int]:
    """By the model, pass by pass."""
    seen: list[int] = []

    def noting(original: Any) -> Any:
        def forward(self: text.Gpt, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(len(tokens))
            return original(self, tokens)

        return forward

    training(task, spec, "cp=2", lambda: replaced(text.Gpt, "forward", noting))
    return seen


def test_how_to_cut_is_found_out_on_a_few_samples(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Riders in a paceline take turns at the front. " * 20)
    seen = ranks(2)(
        rows_seen,
        text.Text(file=str(tmp_path / "text"), width=16, depth=2, heads=2, context=16),
        wanted(steps=2),
    )[0]
    assert max(seen[: seen.index(8)]) == context.TRIAL_SAMPLES


@contextmanager
def local_attention() -> Iterator[None]:
    """Each slice sees but itself."""
    kept = RingAttention.__call__
    RingAttention.__call__ = lambda self, *tensors, **options: F_ATTENTION(*tensors, **options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RingAttention.__call__ = kept  # type: ignore[method-assign]


F_ATTENTION = F.scaled_dot_product_attention


@contextmanager
def unseen() -> Iterator[None]:
    """Local attention, and nobody compares the outputs."""
    with (
        replaced(context.ContextParallel, "_find_difference", lambda original: lambda *_: None),
        local_attention(),
    ):
        yield


def forgotten_factor() -> Any:
    """The gradient of a slice is not multiplied by the ranks that share the sequence."""
    return replaced(
        ring_attention.GatherSlices,
        "backward",
        lambda original: staticmethod(
            lambda ctx, grad: (original(ctx, grad)[0] / ctx.ranks, None, None, None)
        ),
    )


@pytest.mark.parametrize("plant", [unseen, forgotten_factor])
def test_faults_are_seen(plant: Any) -> None:
    for plan in ("cp=2", "zero3,cp=2"):
        assert wrong(2, plan, models.Text(), wanted(), plant)


def refused(task: Task, plan: str, plant: Any = None, **more: Any) -> str:
    with pytest.raises(PlanError) as raised:
        training(task, wanted(SGD, **more), plan, *([] if plant is None else [plant]))
    return str(raised.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (models.Points(), "Sequential calls no F.scaled_dot_product_attention in its blocks"),
        (sequences.Odd(what="by hand"), "OddGpt calls no F.scaled_dot_product_attention in its blocks"),
        (sequences.Odd(what="multihead"), "nn.MultiheadAttention does with need_weights=False"),
        (
            sequences.Odd(what="convolution"),
            "blocks.0 (OddBlock) mixes, numbers or masks positions outside of scaled_dot_product_attention",
        ),
        (sequences.Odd(what="mean"), "blocks.0 (OddBlock) mixes, numbers or masks positions"),
        (sequences.Odd(what="rotary inside"), "blocks.0 (OddBlock) mixes, numbers or masks positions"),
        (
            sequences.Odd(what="cumulative between"),
            "the output of OddGpt with its blocks on slices of the sequence differs",
        ),
        (
            sequences.Odd(what="results on the way"),
            "the output of OddGpt with its blocks on slices of the sequence differs",
        ),
        (
            sequences.Odd(what="dropout of attention"),
            "ring attention does not support dropout, got a probability of 0.1; set it to 0",
        ),
        (
            sequences.Encoder(mask="banded"),
            "encoder.layers.0 (TransformerEncoderLayer) mixes, numbers or masks positions",
        ),
        (
            sequences.Odd(what="window"),
            "ring attention requires a causal mask or none, got a mask of shape (8, 8)",
        ),
        (
            sequences.Ragged(),
            "sequences of 7 positions are not divisible by cp=2; cut them to 6, or use a plan without cp",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(task: Task, message: str) -> None:
    """On each rank at once, so that none waits for another."""
    for plan in ("cp=2", "zero3,cp=2"):
        for said in ranks(2)(refused, task, plan):
            assert message in said


def test_what_attention_leaves_out_is_seen_by_the_output() -> None:
    for said in ranks(2)(refused, models.Text(), "cp=2", local_attention):
        assert "the output of Gpt with its blocks on slices of the sequence differs" in said


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
def test_before_anything_starts(words: list[str], message: str, tmp_path: Path) -> None:
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


BEFORE_AND_AFTER = [
    ((2, "cp=2"), (2, "cp=2")),
    ((2, "cp=2"), (2, "ddp")),
    ((2, "zero3"), (4, "dp=2,cp=2")),
    ((4, "zero3,cp=4"), (1, "single")),
]


@pytest.mark.parametrize(("before", "after"), BEFORE_AND_AFTER)
def test_resumed_under_another_plan(before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    def losses(at: tuple[int, str], until: int, run: str) -> list[float]:
        (tmp_path / run).mkdir(exist_ok=True)
        spec = wanted(steps=until, schedule=Schedule(), save=Save(every=2, minutes=float("inf")))
        return ranks(at[0])(steps, spec, at[1], tmp_path / run)[0]

    found = losses(before, 2, "stopped") + losses(after, 5, "stopped")
    assert difference(found, losses(after, 5, "through")) <= (RTOL if before != after else 0)

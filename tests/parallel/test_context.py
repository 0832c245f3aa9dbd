"""Tests of context parallelism: it trains as one process, and refuses models that it cannot split."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from paceline.parallel.context import slices
from paceline.parallel.context.replace_attention import replace_attention
from paceline.parallel.context.ring_attention import RingAttention
from paceline.parallel.context.sliced_attention import SlicedAttention, SlicedTensors
from paceline.parallel.context.slices import rank_positions
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
        sequences.Variant(kind="window"),
        sequences.Variant(kind="relative bias"),
        pytest.param(sequences.Variant(kind="alibi"), marks=SLOW),
        pytest.param(sequences.Variant(kind="padding"), marks=SLOW),
        pytest.param(sequences.Variant(kind="documents"), marks=SLOW),
        pytest.param(sequences.Variant(kind="multihead"), marks=SLOW),
        pytest.param(sequences.Encoder(mask="banded"), marks=SLOW),
        pytest.param(sequences.Encoder(mask="padding"), marks=SLOW),
        sequences.Encoder(batch_first=False, mask="both"),
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


@pytest.mark.parametrize(
    ("size", "plan"), [(2, "zero3,cp=2,microbatches=2,recompute=full"), pytest.param(3, "cp=3", marks=SLOW)]
)
@pytest.mark.parametrize(
    "kind",
    [
        "nothing",  # causal
        "relative bias",
        *(pytest.param(kind, marks=SLOW) for kind in ("window", "alibi", "padding", "documents")),
    ],
)
def test_sequences_that_cp_does_not_divide(kind: str, size: int, plan: str) -> None:
    """Ranks have 4 and 3 of 7 positions, or 3, 2 and 2."""
    assert not differences_from_single(size, plan, sequences.Shorter(kind=kind, length=7), make_spec(SGD))


@pytest.mark.parametrize(
    ("size", "plan", "length"),
    [
        (2, "cp=2", 7),
        pytest.param(4, "zero3,dp=2,cp=2", 8, marks=SLOW),
        pytest.param(2, "cp=2", 8, marks=SLOW),
    ],
)
def test_batch_norm_in_blocks_sees_the_whole_sequence(size: int, plan: str, length: int) -> None:
    task = sequences.Shorter(kind="batch norm", length=length)
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


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention. `mask`: its shape, or "causal" for the option; `keys`: of another sequence."""

    length: int
    mask: tuple[int, ...] | str | None = None
    keys: int | None = None
    is_bool: bool = False


def compare_attention(case: AttentionCase, dtype: torch.dtype) -> list[float]:
    """Return how far output and gradients of attention on slices are from whole attention on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    draw, length, keys = torch.Generator().manual_seed(1), case.length, case.keys or case.length
    query, key, value, grad = (
        torch.randn(3, heads, at, 6, generator=draw, dtype=dtype)
        for heads, at in ((4, length), (2, keys), (2, keys), (4, length))
    )
    whole, options = (
        [query, key, value],
        {"scale": 0.3, "enable_gqa": True, "is_causal": case.mask == "causal"},
    )
    if isinstance(case.mask, tuple):
        mask = torch.randn(case.mask, generator=draw, dtype=dtype)
        if case.is_bool:
            mask[..., 0] = 1  # each query sees a key
            options["attn_mask"] = mask > 0
        else:
            whole.append(mask)
    positions = rank_positions(length, mesh.get_local_rank(), mesh.size())
    expected = F_ATTENTION(*(tensor.requires_grad_() for tensor in whole), **options)
    # The ranks share the keys of another sequence, and masks: their gradients are summands.
    is_local = [True, case.keys is None, case.keys is None, False][: len(whole)]
    parts = [
        (tensor.detach().index_select(2, positions) if local else tensor.detach().clone()).requires_grad_()
        for tensor, local in zip(whole, is_local, strict=True)
    ]
    handler = SlicedAttention(
        RingAttention(mesh), parse("cp=2"), length, (SlicedTensors(True, case.keys is None),)
    )
    with replace_attention(handler):
        found = F.scaled_dot_product_attention(*parts, **options)
    errors = [relative_difference(found.detach(), expected.detach()[:, :, positions])]
    for part, full, local in zip(
        torch.autograd.grad(found, parts, grad[:, :, positions]),
        torch.autograd.grad(expected, whole, grad),
        is_local,
        strict=True,
    ):
        if not local:
            torch.distributed.all_reduce(part)
        errors.append(relative_difference(part, full[:, :, positions] if local else full))
    return errors


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), 4])
def test_attention_on_slices_equals_attention(size: int) -> None:
    even, uneven = 4 * size, 4 * size - 1
    cases = [
        # in a ring: two chunks on each rank, or one
        *(AttentionCase(length, mask) for length in (even, 3 * size) for mask in ("causal", None)),
        AttentionCase(uneven),
        AttentionCase(uneven, "causal"),
        *(AttentionCase(length, (length, length)) for length in (even, uneven)),
        AttentionCase(even, (even, even), is_bool=True),
        AttentionCase(uneven, (3, 1, 1, uneven), is_bool=True),
        AttentionCase(uneven, (1, 4, uneven, uneven)),
        AttentionCase(even, keys=5),
        AttentionCase(uneven, (3, 1, uneven, 5), keys=5),
        AttentionCase(even, "causal", keys=even - 1),
    ]
    for case in cases:
        for dtype, rtol in ((torch.float64, 1e-14), (torch.float32, 4e-6)):
            for errors in ranks(size)(compare_attention, case, dtype):
                assert max(errors) < rtol, case


def attend_with_cropped_mask(shape: tuple[int, ...], sliced: SlicedTensors) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    handler = SlicedAttention(RingAttention(init_device_mesh("cpu", (2,))), parse("cp=2"), 8, (sliced,))
    query = torch.ones(1, 2, 4, 6)
    with replace_attention(handler), pytest.raises(PlanError) as raised:
        F.scaled_dot_product_attention(query, query, query, torch.ones(shape))
    return str(raised.value)


@pytest.mark.parametrize(
    ("shape", "masks"),
    [
        ((8, 4), {}),  # cropped to the number of keys, which are not the first ones
        ((4, 8), {}),
        ((8, 8), {"attn_mask": (True, False)}),
    ],
)
def test_masks_of_other_shapes_than_in_the_first_pass_are_refused(
    shape: tuple[int, ...], masks: dict[str, tuple[bool, bool]]
) -> None:
    """A model may pass its first mask in a later step, which no trial has checked."""
    for error in ranks(2)(attend_with_cropped_mask, shape, SlicedTensors(True, True, masks)):
        assert "a block calls attention in another way than in the first pass" in error


def drop_weights(length: int) -> tuple[list[float], list[bool]]:
    """Return the errors of weights that dropout kept, and which it kept, of this rank's queries."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, draw, rate = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(1), 0.25
    query, key = (torch.randn(1, 8, length, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    identity = torch.eye(length, dtype=torch.float64).expand(1, 8, length, length)  # output: the weights
    positions = rank_positions(length, mesh.get_local_rank(), 2)
    torch.manual_seed(mesh.get_local_rank())
    handler = SlicedAttention(RingAttention(mesh), parse("cp=2"), length, (SlicedTensors(True, True),))
    with replace_attention(handler):
        found = F.scaled_dot_product_attention(
            *(tensor[:, :, positions] for tensor in (query, key, identity)), dropout_p=rate
        )
    expected = (query @ key.transpose(-1, -2) / 2).softmax(-1)[:, :, positions] / (1 - rate)
    is_kept = found != 0
    return (found - expected)[is_kept].abs().tolist(), is_kept.flatten().tolist()


def test_dropout_in_attention_drops_weights_of_all_keys() -> None:
    """In distribution as on one process: other weights on each rank, at the same rate."""
    (first_errors, first), (second_errors, second) = ranks(2)(drop_weights, 32)
    assert max(first_errors + second_errors) < 1e-12
    assert first != second
    for is_kept in (first, second):
        assert len(is_kept) == 8 * 16 * 32
        assert abs(sum(is_kept) / len(is_kept) - 0.75) < 0.03  # 4 standard deviations


def test_dropout_in_attention_trains() -> None:
    """The ranks of a sequence stay equal, which `train_on_ranks` checks."""
    dropped, whole = (
        train_on_ranks(2, sequences.Variant(kind=kind), make_spec(), "cp=2")
        for kind in ("attention dropout", "nothing")
    )
    assert relative_difference(dropped.losses, whole.losses) > 1e-4


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
    with replaced(
        RingAttention,
        "__call__",
        lambda _: lambda self, *tensors, **options: F_ATTENTION(*tensors, **options),
    ):
        yield


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
        slices.GatherSlices,
        "backward",
        lambda original: staticmethod(
            lambda ctx, grad: (original(ctx, grad)[0] / ctx.ranks, None, None, None)
        ),
    )


@pytest.mark.parametrize("fault", [plant_unchecked_local_attention, plant_missing_factor])
def test_faults_are_detected(fault: Any) -> None:
    for plan in ("cp=2", "zero3,cp=2"):
        assert differences_from_single(2, plan, models.Text(), make_spec(), fault)


def take_first_rows() -> Any:
    """Each rank takes the first rows of a mask."""
    return replaced(
        SlicedAttention,
        "_own_rows",
        lambda original: lambda self, mask, *_: mask.narrow(-2, 0, self.count),
    )


@contextmanager
def plant_unchecked_first_rows() -> Iterator[None]:
    """First rows without a comparison of outputs."""
    with (
        replaced(context.ContextParallel, "_find_difference", lambda original: lambda *_: None),
        take_first_rows(),
    ):
        yield


def plant_unsummed_gradient() -> Any:
    """Do not add the gradients that other ranks have for the keys of a slice."""

    def patch(original: Any) -> Any:
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
            length, rank = grad.size(ctx.dim), ctx.mesh.get_local_rank()
            return grad.index_select(ctx.dim, rank_positions(length, rank, ctx.mesh.size())), None, None, None

        return staticmethod(backward)

    return replaced(slices.GatherForSlices, "backward", patch)


@pytest.mark.parametrize("fault", [plant_unchecked_first_rows, plant_unsummed_gradient])
def test_faults_with_masks_are_detected(fault: Any) -> None:
    task = sequences.Shorter(kind="relative bias")
    for plan in ("cp=2", "zero3,cp=2"):
        assert differences_from_single(2, plan, task, make_spec(SGD), fault)


def test_first_rows_of_a_mask_change_the_output() -> None:
    for error in ranks(2)(
        train_and_return_error, sequences.Variant(kind="relative bias"), "cp=2", take_first_rows
    ):
        assert "the output of VariantGpt with its blocks on slices of the sequence differs" in error


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
        (
            sequences.Variant(kind="convolution"),
            "blocks.0 (VariantBlock) mixes, numbers or masks positions outside of "
            "scaled_dot_product_attention",
        ),
        (sequences.Variant(kind="weights"), "blocks.0 (VariantBlock) mixes, numbers or masks positions"),
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
            sequences.Shorter(kind="nothing", length=3),
            "sequences of 3 positions are too short for cp=2, which requires two positions per rank; use a "
            "plan without cp",
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
            ["text", "--set", "context=6", "--plan", "cp=4"],
            "sequences of 6 positions are too short for cp=4, which requires two positions per rank; use "
            "cp=3 or less",
        ),
        (["digits", "--plan", "cp=4"], "calls no F.scaled_dot_product_attention in its blocks"),
    ],
)
def test_refused_before_ranks_start(words: list[str], message: str, tmp_path: Path) -> None:
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

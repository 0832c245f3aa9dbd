"""Axes that meet: each mixture trains as one process does, and lays out what it says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import sequences
import stacks
from faults import replaced
from harness import differences, differences_from_single, ranks, train_on_ranks, train_on_this_rank
from paceline import Spec, Task, train
from paceline.data.fake import example_batch
from paceline.distributed.dtensor import local_tensor
from paceline.distributed.world import read_world
from paceline.errors import PlanError
from paceline.parallel.context import ring_attention
from paceline.parallel.pipeline.tied_weights import TiedWeightSync
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.tasks import text
from paceline.training import optimizer as optim
from paceline.training.checkpoint import save as checkpoint
from paceline.training.model_analysis import validate_plan
from paceline.training.setup import build_training

pytestmark = pytest.mark.processes

RTOL = 1e-10
ADAMW = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
SGD = Optimizer(
    name="sgd", lr=0.05, weight_decay=0.1
)  # Adam divides the gradient of a bias of the keys, which is 0, by itself
CLIPPED = SGD.model_copy(update={"clip": 0.1})


def make_spec(optimizer: Optimizer = SGD, **more: Any) -> Spec:
    return Spec(**{"steps": 3, "batch": 8, "seed": 3, "precision": "fp64", "optimizer": optimizer, **more})


# A sequence that is split in a pipeline


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "task",
    [
        models.Text(),  # tied
        sequences.Llama(tied=True),
        pytest.param(sequences.Llama(), marks=SLOW),
        pytest.param(sequences.Encoder(mask="causal"), marks=SLOW),
        pytest.param(sequences.Encoder(batch_first=False, mask="causal"), marks=SLOW),
        pytest.param(
            sequences.Variant(kind="causal mask"), marks=SLOW
        ),  # rotary tables, and values that go to every block
    ],
    ids=str,
)
def test_sequences_in_a_pipeline(task: Task) -> None:
    if isinstance(task, sequences.Llama):
        pytest.importorskip("transformers")
    assert not differences_from_single(4, "pp=2,cp=2,microbatches=2", task, make_spec())


@pytest.mark.parametrize(
    "plan",
    [
        "pp_schedule=zero-bubble,recompute=selective",
        pytest.param("pp_schedule=interleaved", marks=SLOW),
        pytest.param("pp_schedule=zbv,zero=3", marks=SLOW),
        pytest.param("pp_schedule=gpipe,zero=1,recompute=full", marks=SLOW),
    ],
)
def test_sequences_under_every_schedule(plan: str) -> None:
    assert not differences_from_single(4, f"pp=2,cp=2,microbatches=2,{plan}", models.Text(), make_spec(ADAMW))


EIGHT = [
    "pp=2,cp=2,dp=2,microbatches=2",
    "pp=2,cp=2,dp=2,microbatches=2,zero=1",
    "pp=2,cp=2,dp=2,microbatches=2,zero=3,pp_schedule=zbv",
    "pp=2,cp=2,tp=2,microbatches=2",
    "pp=4,cp=2,microbatches=4",
    "pp=2,dp=2,tp=2,microbatches=2,zero=1",
    "cp=2,dp=2,tp=2,zero=1",
    "pp=2,dp=2,tp=2,microbatches=2,pp_schedule=zbv",
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", EIGHT)
@pytest.mark.parametrize(
    "task",
    [models.Text(), sequences.Encoder(mask="causal"), sequences.Llama(tied=True), sequences.Llama()],
    ids=str,
)
def test_eight_ranks(task: Task, plan: str) -> None:
    spec = make_spec()
    try:
        validate_plan(spec, parse(plan).resolve(8), task)
    except PlanError:
        pytest.skip("too few parts")
    assert not differences_from_single(8, plan, task, spec)


def test_evaluation_in_slices(tmp_path: Path) -> None:
    """Its batches have other shapes, and the last one is short."""
    file = tmp_path / "text"
    file.write_text("Riders in a paceline take turns at the front. " * 20)
    task = text.Text(file=str(file), width=16, depth=2, heads=2, context=16)
    assert not differences_from_single(4, "pp=2,cp=2,microbatches=2", task, make_spec(evaluate_every=2))


@pytest.mark.slow
def test_dropout_in_slices() -> None:
    """Each stage and slice has a stream of its own, and draws the same again."""
    task, spec = sequences.Variant(kind="dropout"), make_spec()
    first = train_on_ranks(4, task, spec, "pp=2,cp=2,microbatches=2")
    assert not differences(train_on_ranks(4, task, spec, "pp=2,cp=2,microbatches=2"), first, 0.0)
    assert differences(first, train_on_ranks(1, task, spec, "single"), 1e-3)


def refused(task: Task, plan: str) -> str:
    with pytest.raises(PlanError) as raised:
        train_on_this_rank(task, make_spec(), plan)
    return str(raised.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        pytest.param(
            sequences.Variant(kind="convolution"),
            "(VariantBlock) mixes, numbers or masks positions outside of",
            marks=SLOW,
        ),
        pytest.param(
            sequences.Variant(kind="window"),
            "ring attention requires a causal mask or none, got a mask of shape (8, 8)",
            marks=SLOW,
        ),
        (
            sequences.Variant(kind="cumulative between"),
            "the output of VariantGpt with its blocks on slices of the sequence differs",
        ),
    ],
    ids=str,
)
def test_what_is_refused_in_one_stage_is_refused_on_all_ranks(task: Task, message: str) -> None:
    for said in ranks(4)(refused, task, "pp=2,cp=2,microbatches=2"):
        assert message in said


class OneBlock(sequences.Llama):
    """Most of the parameters are in one block, which a pipeline cuts inside."""

    def model(self) -> torch.nn.Module:
        whole: Any = super().model()
        del whole.model.layers[1]
        return whole


def test_blocks_are_not_cut_inside_and_across() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        PlanError, match=r"pp can cut model.layers.0, which has most of the parameters, and cp needs it whole"
    ):
        validate_plan(make_spec(), parse("pp=2,cp=2").resolve(4), OneBlock())


# Optimizer state that is dealt out where parameters are cut


@pytest.mark.parametrize(
    ("plan", "task", "optimizer"),
    [
        ("dp=2,pp=2,microbatches=2,zero=1", models.Text(), ADAMW),
        ("dp=2,tp=2,zero=1", sequences.Encoder(), SGD),
        pytest.param("cp=2,tp=2,microbatches=2,zero=1", sequences.Encoder(), CLIPPED, marks=SLOW),
    ],
)
def test_dealt_state(plan: str, task: Task, optimizer: Optimizer) -> None:
    assert not differences_from_single(4, plan, task, make_spec(optimizer))


@dataclass(frozen=True)
class Held:
    parameters: int
    state: int


def held(plan: str) -> Held:
    task, me, spec = sequences.Encoder(), read_world(), make_spec(ADAMW)
    on_ranks = parse(plan).resolve(me.size)
    laid = build_training(spec, on_ranks, me, task, torch.device("cpu"))
    laid.update([example_batch(spec, task, on_ranks)] * on_ranks.microbatches, 0, 1.0)
    state = [value for of in laid.step.optimizer.state.values() for value in of.values() if value.dim()]
    return Held(elements(laid.step.params), elements(state))


def elements(tensors: Any) -> int:
    return sum(local_tensor(tensor).numel() for tensor in tensors)


@pytest.mark.parametrize("axis", ["pp=2,microbatches=2", pytest.param("tp=2", marks=SLOW)])
def test_state_is_dealt_out(axis: str) -> None:
    whole, dealt = (ranks(4)(held, f"dp=2,{axis},zero={zero}") for zero in (0, 1))
    assert [of.parameters for of in dealt] == [of.parameters for of in whole]
    assert [of.state for of in whole] == [2 * of.parameters for of in whole]
    assert 2 * sum(of.state for of in dealt) == sum(of.state for of in whole)
    assert all(of.state < 0.75 * there.state for of, there in zip(dealt, whole, strict=True))


def test_dealing() -> None:
    assert optim.balance_by_size([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert optim.balance_by_size([], 2) == []


# Tied weights of which both holders are one rank


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    "task", [models.Text(), pytest.param(stacks.HuggingFace(), marks=SLOW)], ids=["text", "llama"]
)
def test_tied_on_one_rank(task: Task, zero: int) -> None:
    if isinstance(task, stacks.HuggingFace):
        pytest.importorskip("transformers")
    assert not differences_from_single(
        4, f"dp=2,pp=2,microbatches=2,pp_schedule=zbv,zero={zero}", task, make_spec(ADAMW)
    )


# Checkpoints


def kept(plan: str, steps: int, run: Path) -> None:
    list(train(make_spec(CLIPPED, steps=steps), parse(plan), task=sequences.Encoder(), run=RunFolder(run)))


@pytest.mark.parametrize(
    "plans",
    [
        ("pp=2,cp=2,microbatches=2", "dp=2,tp=2,zero=1"),
        pytest.param(("dp=2,pp=2,microbatches=2,zero=1", "pp=2,cp=2,microbatches=2,zero=3"), marks=SLOW),
    ],
)
def test_resumed_under_another_mixture(plans: tuple[str, str], tmp_path: Path) -> None:
    """And then on one process."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    for path, plan, steps in (
        (whole, "single", 4),
        *((run, plan, at) for at, plan in enumerate((*plans, "single"), start=2)),
    ):
        path.mkdir(exist_ok=True)
        ranks(1 if plan == "single" else 4)(kept, plan, steps, path)
    expected, found = (checkpoint.load_weights(RunFolder(path).checkpoint(4)) for path in (whole, run))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=RTOL, atol=RTOL)


# Negative controls


def not_sent() -> Any:
    """Each rank keeps what it has updated to itself."""

    def by(original: Any) -> Any:
        def deal(optimizer: torch.optim.Optimizer) -> None:
            original(optimizer)
            optimizer._optimizer_step_post_hooks.clear()

        return deal

    return replaced(optim, "_shard_by_parameter", by)


def copy_forgotten() -> Any:
    """The gradient of one of two holders is dropped."""

    def by(original: Any) -> Any:
        def sum_gradients(self: TiedWeightSync) -> None:
            for _, stage, own in self.copies:
                getattr(stage, own).grad = None
            original(self)

        return sum_gradients

    return replaced(TiedWeightSync, "sum_gradients", by)


def copy_not_renewed() -> Any:
    def by(original: Any) -> Any:
        def renew(self: TiedWeightSync) -> None:
            if not hasattr(self, "renewed"):
                original(self)
            self.renewed = True  # type: ignore[attr-defined]

        return renew

    return replaced(TiedWeightSync, "renew_copies", by)


def forgotten_factor() -> Any:
    """The gradient of a slice is not multiplied by the ranks that share the sequence."""
    return replaced(
        ring_attention.GatherSlices,
        "backward",
        lambda original: staticmethod(
            lambda ctx, grad: (original(ctx, grad)[0] / ctx.ranks, None, None, None)
        ),
    )


@pytest.mark.parametrize(
    ("plant", "plan"),
    [
        (copy_forgotten, "dp=2,pp=2,microbatches=2,pp_schedule=zbv"),
        (copy_not_renewed, "dp=2,pp=2,microbatches=2,pp_schedule=zbv,zero=2"),
        (forgotten_factor, "pp=2,cp=2,microbatches=2"),
    ],
)
def test_what_is_wrong_is_caught(plant: Any, plan: str) -> None:
    assert differences_from_single(4, plan, models.Text(), make_spec(), plant)


def test_state_that_is_not_sent_is_caught() -> None:
    with pytest.raises(AssertionError, match="differs from the others"):
        differences_from_single(4, "dp=2,pp=2,microbatches=2,zero=1", models.Text(), make_spec(), not_sent)

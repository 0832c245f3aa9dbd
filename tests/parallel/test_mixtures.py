"""Plans with several axes train like one process and divide parameters and state as specified."""

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
from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import local_tensor
from paceline.distributed.world import read_world
from paceline.errors import PlanError
from paceline.parallel.context import slices
from paceline.parallel.pipeline.tied_weights import TiedWeightSync
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.tasks import text
from paceline.training.checkpoint.stored import load_weights
from paceline.training.model_facts.model_analysis import validate_plan
from paceline.training.optimization import optimizer as optim
from paceline.training.setup import build_training

pytestmark = pytest.mark.processes

RTOL = 1e-10
ADAMW = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
# For models with a bias of the keys: its gradient is 0 up to rounding, and Adam would divide it by itself.
SGD = Optimizer(name="sgd", lr=0.05, weight_decay=0.1)
CLIPPED = SGD.model_copy(update={"clip": 0.1})


def make_spec(optimizer: Optimizer = SGD, **more: Any) -> Spec:
    return Spec(**{"steps": 3, "batch": 8, "seed": 3, "precision": "fp64", "optimizer": optimizer, **more})


# Context parallelism in a pipeline


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "task",
    [
        models.Text(),  # tied
        pytest.param(sequences.Llama(tied=True), marks=SLOW),
        pytest.param(sequences.Llama(), marks=SLOW),
        pytest.param(sequences.Encoder(mask="causal"), marks=SLOW),
        pytest.param(sequences.Encoder(batch_first=False, mask="causal"), marks=SLOW),
        pytest.param(
            sequences.Variant(kind="causal mask"), marks=SLOW
        ),  # rotary tables, and values that all blocks read
    ],
    ids=str,
)
def test_context_parallel_pipeline_equals_one_process(task: Task) -> None:
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
def test_context_parallel_pipeline_under_each_schedule(plan: str) -> None:
    assert not differences_from_single(4, f"pp=2,cp=2,microbatches=2,{plan}", models.Text(), make_spec(ADAMW))


PLANS_FOR_EIGHT_RANKS = [
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
@pytest.mark.parametrize("plan", PLANS_FOR_EIGHT_RANKS)
@pytest.mark.parametrize(
    "task",
    [models.Text(), sequences.Encoder(mask="causal"), sequences.Llama(tied=True), sequences.Llama()],
    ids=str,
)
def test_three_axes_on_eight_ranks_equal_one_process(task: Task, plan: str) -> None:
    spec = make_spec()
    try:
        validate_plan(spec, parse(plan).resolve(8), task)
    except PlanError:
        pytest.skip("the model has too few stages")
    assert not differences_from_single(8, plan, task, spec)


def test_evaluation_of_a_context_parallel_pipeline(tmp_path: Path) -> None:
    """Evaluation batches have other shapes, and the last batch is smaller."""
    file = tmp_path / "text"
    file.write_text("Riders in a paceline take turns at the front. " * 20)
    task = text.Text(file=str(file), width=16, depth=2, heads=2, context=16)
    assert not differences_from_single(4, "pp=2,cp=2,microbatches=2", task, make_spec(evaluate_every=2))


@pytest.mark.slow
def test_dropout_of_a_context_parallel_pipeline_is_reproducible() -> None:
    """Each stage and slice has a separate random stream. A second run draws the same values."""
    task, spec = sequences.Variant(kind="dropout"), make_spec()
    first = train_on_ranks(4, task, spec, "pp=2,cp=2,microbatches=2")
    assert not differences(train_on_ranks(4, task, spec, "pp=2,cp=2,microbatches=2"), first, 0.0)
    assert differences(first, train_on_ranks(1, task, spec, "single"), 1e-3)


def refusal(task: Task, plan: str) -> str:
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
        (
            sequences.Shorter(kind="nothing", length=3),
            "sequences of 3 positions are too short for cp=2",
        ),
        (
            sequences.Variant(kind="cumulative between"),
            "the output of VariantGpt with its blocks on slices of the sequence differs",
        ),
    ],
    ids=str,
)
def test_unsupported_block_is_refused_on_all_ranks(task: Task, message: str) -> None:
    for error in ranks(4)(refusal, task, "pp=2,cp=2,microbatches=2"):
        assert message in error


class OneBlock(sequences.Llama):
    """Most of the parameters are in one block, so a pipeline cuts inside it."""

    def model(self) -> torch.nn.Module:
        whole: Any = super().model()
        del whole.model.layers[1]
        return whole


def test_pipeline_inside_a_block_excludes_context_parallelism() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        PlanError, match=r"pp can cut model.layers.0, which has most of the parameters, and cp needs it whole"
    ):
        validate_plan(make_spec(), parse("pp=2,cp=2").resolve(4), OneBlock())


# Optimizer state that is sharded by parameter, for parameters that are already sharded


@pytest.mark.parametrize(
    ("plan", "task", "optimizer"),
    [
        ("dp=2,pp=2,microbatches=2,zero=1", models.Text(), ADAMW),
        pytest.param("dp=2,tp=2,zero=1", sequences.Encoder(), SGD, marks=SLOW),
        pytest.param("cp=2,tp=2,microbatches=2,zero=1", sequences.Encoder(), CLIPPED, marks=SLOW),
    ],
)
def test_sharded_state_equals_one_process(plan: str, task: Task, optimizer: Optimizer) -> None:
    assert not differences_from_single(4, plan, task, make_spec(optimizer))


@dataclass(frozen=True)
class RankElements:
    """Numbers of elements on a rank."""

    parameters: int
    state: int


def count_elements_on_rank(plan: str) -> RankElements:
    task, world, spec = sequences.Encoder(), read_world(), make_spec(ADAMW)
    resolved = parse(plan).resolve(world.size)
    training = build_training(spec, resolved, world, task, torch.device("cpu"))
    training.update([example_batch(spec, task, resolved)] * resolved.microbatches, 0, 1.0)
    states = training.step.optimizer.state.values()
    state = [value for values in states for value in values.values() if value.dim()]
    return RankElements(count_elements(training.step.params), count_elements(state))


def count_elements(tensors: Any) -> int:
    return sum(local_tensor(tensor).numel() for tensor in tensors)


@pytest.mark.parametrize("axis", ["pp=2,microbatches=2", pytest.param("tp=2", marks=SLOW)])
def test_zero1_shards_state_in_mixtures(axis: str) -> None:
    whole, sharded = (ranks(4)(count_elements_on_rank, f"dp=2,{axis},zero={zero}") for zero in (0, 1))
    assert [rank.parameters for rank in sharded] == [rank.parameters for rank in whole]
    assert [rank.state for rank in whole] == [2 * rank.parameters for rank in whole]
    assert 2 * sum(rank.state for rank in sharded) == sum(rank.state for rank in whole)
    assert all(part.state < 0.75 * full.state for part, full in zip(sharded, whole, strict=True))


def test_balance_by_size() -> None:
    assert balance_by_size([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert balance_by_size([], 2) == []


# Tied weights in two stages on one rank


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    "task", [models.Text(), pytest.param(stacks.HuggingFace(), marks=SLOW)], ids=["text", "llama"]
)
def test_tied_weights_on_one_rank_equal_one_process(task: Task, zero: int) -> None:
    if isinstance(task, stacks.HuggingFace):
        pytest.importorskip("transformers")
    assert not differences_from_single(
        4, f"dp=2,pp=2,microbatches=2,pp_schedule=zbv,zero={zero}", task, make_spec(ADAMW)
    )


# Checkpoints


def train_run(plan: str, steps: int, run: Path) -> None:
    list(train(make_spec(CLIPPED, steps=steps), parse(plan), task=sequences.Encoder(), run=RunFolder(run)))


@pytest.mark.parametrize(
    "plans",
    [
        ("pp=2,cp=2,microbatches=2", "dp=2,tp=2,zero=1"),
        pytest.param(("dp=2,pp=2,microbatches=2,zero=1", "pp=2,cp=2,microbatches=2,zero=3"), marks=SLOW),
    ],
)
def test_checkpoint_resumes_under_another_mixture(plans: tuple[str, str], tmp_path: Path) -> None:
    """The run continues under a second mixture, and then on one process."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    for path, plan, steps in (
        (whole, "single", 4),
        *((run, plan, at) for at, plan in enumerate((*plans, "single"), start=2)),
    ):
        path.mkdir(exist_ok=True)
        ranks(1 if plan == "single" else 4)(train_run, plan, steps, path)
    expected, found = (load_weights(RunFolder(path).checkpoint(4)) for path in (whole, run))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=RTOL, atol=RTOL)


# Negative controls


def updates_not_broadcast() -> Any:
    """Ranks do not broadcast the parameters that they update."""

    def patch(original: Any) -> Any:
        def shard(optimizer: torch.optim.Optimizer) -> None:
            original(optimizer)
            optimizer._optimizer_step_post_hooks.clear()

        return shard

    return replaced(optim, "_shard_by_parameter", patch)


def tied_gradient_dropped() -> Any:
    """Drop the gradient of one of two tied weights."""

    def patch(original: Any) -> Any:
        def sum_gradients(self: TiedWeightSync) -> None:
            for _, stage, name in self.copies:
                getattr(stage, name).grad = None
            original(self)

        return sum_gradients

    return replaced(TiedWeightSync, "sum_gradients", patch)


def tied_copy_not_renewed() -> Any:
    """Renew the copies of tied weights only once."""

    def patch(original: Any) -> Any:
        def renew(self: TiedWeightSync) -> None:
            if not hasattr(self, "renewed"):
                original(self)
            self.renewed = True  # type: ignore[attr-defined]

        return renew

    return replaced(TiedWeightSync, "renew_copies", patch)


def slice_gradient_not_scaled() -> Any:
    """Do not multiply the gradient of a slice by the number of ranks that share the sequence."""
    return replaced(
        slices.GatherSlices,
        "backward",
        lambda original: staticmethod(
            lambda ctx, grad: (original(ctx, grad)[0] / ctx.ranks, None, None, None)
        ),
    )


@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        (tied_gradient_dropped, "dp=2,pp=2,microbatches=2,pp_schedule=zbv"),
        (tied_copy_not_renewed, "dp=2,pp=2,microbatches=2,pp_schedule=zbv,zero=2"),
        (slice_gradient_not_scaled, "pp=2,cp=2,microbatches=2"),
    ],
)
def test_faults_are_detected(fault: Any, plan: str) -> None:
    assert differences_from_single(4, plan, models.Text(), make_spec(), fault)


def test_missing_broadcast_of_updates_is_detected() -> None:
    with pytest.raises(AssertionError, match="differs from the others"):
        differences_from_single(
            4, "dp=2,pp=2,microbatches=2,zero=1", models.Text(), make_spec(), updates_not_broadcast
        )

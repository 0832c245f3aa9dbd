"""Pipelines train as one process under every schedule, with and without data ranks; others are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models
import stacks
from harness import TrainingResult, differences, ranks, train_on_ranks
from paceline import Spec, Task, train
from paceline.data.fake import example_batch
from paceline.errors import PlanError
from paceline.parallel.module_hooks import find_parts
from paceline.parallel.pipeline.forward_trace import TensorMeta
from paceline.parallel.pipeline.runner import Pipeline
from paceline.parallel.pipeline.split_backward import WeightGradients
from paceline.parallel.pipeline.stage import Stage, StagePartition, divide, stage_ranks
from paceline.parallel.pipeline.stand_in_model import StandInModel
from paceline.parallel.pipeline.tied_weights import TiedWeightSync
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.training.checkpoint.stored import load_weights
from paceline.training.model_facts.model_analysis import build_meta_model, validate_plan

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
RTOL = 1e-10  # BatchNorm over the two samples of a micro-batch loses a digit or two
SPEC = Spec(
    steps=3, batch=8, seed=3, precision="fp64", optimizer=Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
)
DEEP: list[Task] = [models.Text(), models.Idle(), models.Unrecorded(), stacks.Encoder(), stacks.TwoTowers()]
HUGGING_FACE: list[Task] = [
    stacks.HuggingFace(kind="gpt2"),
    stacks.HuggingFace(),
    stacks.HuggingFace(tied=False),
]
OTHERS: list[Task] = [
    models.Points(),
    models.Images(),
    models.NormedImages(),
    models.ScalarText(),
    models.Scalar(),
    models.Frozen(),
    models.Weighed(),
    models.OwnOptimizer(),
    models.Backbone(),
    models.Shared(),
    stacks.Skips(),
]
references: dict[tuple[Any, ...], TrainingResult] = {}


def slow_except(quick: list[tuple[Any, Any]], *cases: tuple[Any, Any]) -> list[Any]:
    """Return the cases, marked as slow except those in `quick`."""
    assert all(case in cases for case in quick)
    return [case if case in quick else pytest.param(*case, marks=SLOW) for case in cases]


def compare(size: int, plan: str, task: Task, spec: Spec = SPEC, fault: Any = None) -> list[str]:
    """Return how a plan differs from one process with the same micro-batches."""
    microbatches = next(word for word in plan.split(",") if word.startswith("microbatches"))
    key = repr(task), microbatches, spec.model_dump_json()
    if key not in references:
        references[key] = train_on_ranks(1, task, spec, f"single,{microbatches}")
    results = (
        train_on_ranks(size, task, spec, plan, fault)
        if fault is not None
        else train_on_ranks(size, task, spec, plan)
    )
    return differences(results, references[key], RTOL)


@pytest.mark.parametrize(
    ("schedule", "task"),
    slow_except(
        [
            ("gpipe", models.Unrecorded()),
            ("1f1b", stacks.Encoder()),
            ("interleaved", stacks.TwoTowers()),
            ("zero-bubble", models.Idle()),
            ("zbv", models.Text()),
        ],
        *product(SCHEDULES, DEEP),
    ),
    ids=str,
)
def test_schedules_match_one_process(schedule: str, task: Task) -> None:
    assert not compare(2, f"pp=2,microbatches=4,pp_schedule={schedule}", task)


@pytest.mark.parametrize("task", OTHERS, ids=repr)
def test_tasks_match_one_process(task: Task) -> None:
    assert not compare(2, "pp=2,microbatches=4", task)


def test_evaluation_in_bf16() -> None:
    """Tensors cross cuts in bf16, as in training."""
    spec = SPEC.model_copy(update={"precision": "bf16", "evaluate_every": 2})
    metrics = train_on_ranks(2, models.NormedImages(), spec, "pp=2,microbatches=2").metrics
    assert metrics
    assert np.isfinite([row["loss"] for row in metrics]).all()


@pytest.mark.parametrize(
    ("task", "zero"),
    slow_except(
        [(models.Text(), 3), (models.NormedImages(), 0), (models.Idle(), 2)],
        *product(
            (models.Text(), models.NormedImages(), models.Frozen(), models.Idle(), stacks.Encoder()),
            (0, 2, 3),
        ),
    ),
    ids=str,
)
def test_data_ranks(task: Task, zero: int) -> None:
    assert not compare(4, f"dp=2,pp=2,microbatches=2,zero={zero}", task)


@pytest.mark.parametrize(
    "schedule", [pytest.param("interleaved", marks=SLOW), pytest.param("zero-bubble", marks=SLOW), "zbv"]
)
def test_interleaved_stages_with_data_ranks(schedule: str) -> None:
    assert not compare(4, f"dp=2,pp=2,microbatches=2,zero=3,pp_schedule={schedule}", stacks.Encoder())


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=SLOW), "1f1b"])
@pytest.mark.parametrize("task", [models.Text(), pytest.param(stacks.Encoder(), marks=SLOW)], ids=repr)
def test_four_stages(task: Task, schedule: str) -> None:
    assert not compare(4, f"pp=4,microbatches=4,pp_schedule={schedule}", task)


@pytest.mark.parametrize(
    "task",
    [task if task == stacks.HuggingFace() else pytest.param(task, marks=SLOW) for task in HUGGING_FACE],
    ids=repr,
)
def test_hugging_face(task: Task) -> None:
    assert not compare(2, "pp=2,microbatches=4", task)


@pytest.mark.parametrize(
    ("task", "schedule"),
    slow_except(
        [
            (stacks.EncoderDecoder(kind="t5"), "zbv"),
            (stacks.PassingBlocks(), "zbv"),
        ],
        *product(
            (
                *(stacks.EncoderDecoder(kind=kind) for kind in ("t5", "bart", "whisper")),
                stacks.PassingBlocks(),
            ),
            ("interleaved", "zero-bubble", "zbv"),
        ),
    ),
    ids=str,
)
def test_additional_tensors_cross_cuts(task: Task, schedule: str) -> None:
    """Encoder states, biases of another block, constants, and parameters that no input leads to."""
    results = compare(2, f"pp=2,microbatches=2,pp_schedule={schedule}", task)
    # The gradient of a key bias is 0 except for rounding errors, which Adam normalizes.
    assert not [name for name in results if "k_proj.bias" not in name]


@SLOW
@pytest.mark.parametrize("task", [*HUGGING_FACE, *DEEP, *OTHERS], ids=repr)
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *[
            (2, f"pp=2,microbatches={microbatches},pp_schedule={schedule}")
            for schedule in SCHEDULES
            for microbatches in (2, 8)
        ],
        *[(4, f"pp=4,microbatches=4,pp_schedule={schedule}") for schedule in SCHEDULES],
        *[
            (4, f"dp=2,pp=2,microbatches=2,zero={zero},pp_schedule={schedule}")
            for zero in (0, 2, 3)
            for schedule in SCHEDULES
        ],
    ],
)
def test_all_combinations_equal_one_process(size: int, plan: str, task: Task) -> None:
    try:
        validate_plan(SPEC, parse(plan).resolve(size), task)
    except PlanError:
        pytest.skip("too few parts")
    assert not compare(size, plan, task)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("1f1b", "full"),
        pytest.param("1f1b", "selective", marks=SLOW),
        pytest.param("interleaved", "selective", marks=SLOW),
        ("zero-bubble", "full"),
        pytest.param("zero-bubble", "selective", marks=SLOW),
        ("zbv", "selective"),
    ],
)
def test_recomputed_activations(schedule: str, recompute: str) -> None:
    assert not compare(2, f"pp=2,microbatches=2,pp_schedule={schedule},recompute={recompute}", models.Text())


def test_sgd_without_clipping() -> None:
    """No rank knows the norm of the whole gradient before the update."""
    spec = SPEC.model_copy(update={"optimizer": Optimizer(name="sgd", lr=0.05, weight_decay=0.1)})
    assert not compare(2, "pp=2,microbatches=2", models.Text(), spec)
    assert not compare(4, "dp=2,pp=2,microbatches=2,zero=2", models.Text(), spec)


def test_dropout_differs_by_stage_and_step() -> None:
    first = train_on_ranks(2, stacks.Dropping(), SPEC, "pp=2,microbatches=4,pp_schedule=interleaved")
    assert not differences(
        train_on_ranks(2, stacks.Dropping(), SPEC, "pp=2,microbatches=4,pp_schedule=interleaved"), first, 0.0
    )
    assert differences(train_on_ranks(2, stacks.Dropping(), SPEC, "pp=2,microbatches=4"), first, 1e-3)
    assert all(np.isfinite(first.losses))


# Checkpoints


def train_steps(task: Task, plan: str, steps: int, run: Path) -> None:
    list(train(SPEC.model_copy(update={"steps": steps}), parse(plan), task=task, run=RunFolder(run)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("pp=2,microbatches=2", "single", marks=SLOW),
        pytest.param("single", "pp=2,microbatches=2", marks=SLOW),
        ("pp=2,microbatches=2,pp_schedule=zbv", "zero3"),
        ("ddp", "pp=2,microbatches=2"),
    ],
)
def test_resume_under_another_plan(first: str, second: str, tmp_path: Path) -> None:
    """Tied weights and optimizer state move from stages to whole models and back."""
    task, whole = models.Text(), tmp_path / "whole"
    run = tmp_path / "run"
    for path, plan, steps in ((whole, "single", 5), (run, first, 2), (run, second, 5)):
        path.mkdir(exist_ok=True)
        ranks(1 if plan == "single" else 2)(train_steps, task, plan, steps, path)
    expected, results = (load_weights(RunFolder(path).checkpoint(5)) for path in (whole, run))
    assert expected.keys() == results.keys() == models.Gpt().state_dict().keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(results[name], tensor, rtol=RTOL, atol=RTOL)


# How a model is divided


def partition_of(task: Task, plan: str, size: int) -> tuple[torch.nn.Module, StagePartition]:
    resolved = parse(plan).resolve(size)
    model = build_meta_model(SPEC, task).model
    trace = StandInModel(model, task.layout(), CPU).trace(
        task, example_batch(SPEC, task, resolved), "fp64", training=True
    )
    return model, divide(resolved, model, find_parts(model, task.layout()), trace)


def test_stages_are_balanced_by_flops() -> None:
    """By FLOPs, not by number of layers: in digits, the first convolution is cheap, the second nearly all."""
    _, partition = partition_of(models.Text(), "pp=2,microbatches=2", 2)
    assert [partition.calls[begin] for begin in partition.begins] == [
        "tokens",
        "blocks.2",
    ]  # the head is cheaper than a block
    model, partition = partition_of(stacks.Encoder(), "pp=4,microbatches=4", 4)
    assert [partition.calls[begin] for begin in partition.begins][1:-1] == [
        "encoder.layers.1",
        "encoder.layers.2",
    ]
    assert set(partition.holders) == {name for name, _ in model.named_parameters()}


def test_shared_parameters_are_held_by_all_their_stages() -> None:
    model, partition = partition_of(models.Text(), "pp=4,microbatches=4", 4)
    assert partition.holders["tokens.weight"] == (0, 3)
    assert {len(of) for name, of in partition.holders.items() if name != "tokens.weight"} == {1}
    assert [name for name, _ in model.named_parameters()] == list(partition.holders)


def test_stage_ranks() -> None:
    assert stage_ranks(parse("pp=2,pp_schedule=interleaved").resolve(2)) == [0, 1, 0, 1]
    assert stage_ranks(parse("pp=3,pp_schedule=zbv,microbatches=6").resolve(3)) == [0, 1, 2, 2, 1, 0]


def test_placeholders_are_nan_without_memory() -> None:
    assert TensorMeta((2, 3), torch.float32).placeholder(CPU).isnan().all()
    assert TensorMeta((2, 3), torch.float32).placeholder(CPU).untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("task", "plan", "size", "message"),
    [
        (models.Points(), "pp=4", 4, r"has 4 stages, and Sequential can be cut into 3 at most; use pp=2$"),
        (
            models.Points(),
            "pp=2,pp_schedule=zbv",
            2,
            r"has 4 stages, .* 3 at most; use pp=2 with pp_schedule=1f1b",
        ),
        (
            stacks.Skips(),
            "pp=5,microbatches=8",
            5,
            r"not before up.0: up.1 also needs values computed earlier\); use pp=3 or pp=4",
        ),
        (
            stacks.HiddenSkip(),
            "pp=3,microbatches=4",
            3,
            r"can be cut into 2 at most \(not before blocks.0: blocks.0 is called more than once\); use pp=2",
        ),
        (
            stacks.Recomputing(),
            "pp=2",
            2,
            r"\(not before blocks.1: the model itself, and not recompute=full, recomputes blocks.1 in "
            r"the backward pass\); use a plan",
        ),
        (models.Temperature(), "pp=2", 2, r"can be cut into 1 at most; use a plan without pp"),
        (
            stacks.Conditional(),
            "pp=2",
            2,
            r"cannot run on tensors without values, .*use a plan without pp",
        ),
        (models.Routed(), "pp=2", 2, r"cannot run on tensors without values, .*use a plan without pp"),
    ],
)
def test_uncuttable_models_are_refused_at_validation(task: Task, plan: str, size: int, message: str) -> None:
    spec = SPEC.model_copy(update={"batch": 16 * size})
    with pytest.raises(PlanError, match=message):
        validate_plan(spec, parse(plan).resolve(size), task)


# Negative controls


@contextmanager
def replaced(owner: Any, attribute: str, by: Any) -> Iterator[None]:
    original = getattr(owner, attribute)
    setattr(owner, attribute, by)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def skip_tied_sync() -> Any:
    return replaced(TiedWeightSync, "sum_gradients", lambda self: None)


def count_norm_twice() -> Any:
    """Each stage counts the tied weights in the norm."""
    original = Pipeline.parallelize

    def parallelize(self: Pipeline, *args: Any) -> None:
        original(self, *args)
        self.counted_elsewhere = set()

    return replaced(Pipeline, "parallelize", parallelize)


def skip_a_part() -> Any:
    """The second stage skips its first part."""
    original = Stage.visit_call

    def visit_call(self: Stage, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        skip = self.index == 1 and self.at == self.first
        return original(self, name, (lambda *a, **k: a[0]) if skip else run, args, kwargs)

    return replaced(Stage, "visit_call", visit_call)


def drop_a_gradient() -> Any:
    original = WeightGradients.run

    def run(self: WeightGradients) -> None:
        self.deferred = self.deferred[:-1]
        original(self)

    return replaced(WeightGradients, "run", run)


def test_missing_gradient_is_an_error() -> None:
    with pytest.raises(
        AssertionError,
        match=r"PlanError: .*: \S+.* got no gradient in this pipeline, and gets one on one process",
    ):
        compare(2, "pp=2,microbatches=2,pp_schedule=zbv", models.Text(), SPEC, drop_a_gradient)


@pytest.mark.parametrize("fault", [skip_tied_sync, count_norm_twice, skip_a_part])
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "pp=2,microbatches=2"),
        pytest.param(4, "dp=2,pp=2,microbatches=2,zero=2", marks=SLOW),
    ],
)
def test_planted_faults_are_caught(size: int, plan: str, fault: Any) -> None:
    raised = {
        skip_tied_sync: r"differs from the others: \['tokens.weight",  # even the copies differ
        skip_a_part: "got no gradient in this pipeline",
    }
    if fault in raised:
        with pytest.raises(AssertionError, match=raised[fault]):
            compare(size, plan, models.Text(), SPEC, fault)
    else:
        assert compare(size, plan, models.Text(), SPEC, fault)

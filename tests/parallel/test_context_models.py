"""Tests of context parallelism with several stacks of blocks, and with models of transformers."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import models
import sequences
from attention_models import FLOAT32_INSIDE, Attention
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
from paceline.events import Noted
from paceline.parallel.context.apply import ContextParallel
from paceline.parallel.context.sliced_attention import SlicedAttention
from paceline.parallel.context.sliced_runs import SlicedRun
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer

pytestmark = pytest.mark.processes

SLOW = pytest.mark.slow
SPEC = Spec(
    steps=3, batch=8, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, weight_decay=0.1)
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
PLANS = [
    (2, "zero3,cp=2,microbatches=2,recompute=full"),
    *(
        pytest.param(size, plan, marks=SLOW)
        for size, plan in (
            (2, "cp=2"),
            (4, "cp=4"),
            (4, "dp=2,cp=2"),
            (4, "tp=2,cp=2"),
            (4, "zero3,dp=2,cp=2"),
        )
    ),
]


@pytest.mark.parametrize(("size", "plan"), PLANS)
@pytest.mark.parametrize(
    "task",
    [
        sequences.SharedBias(),
        sequences.Translation(),
        pytest.param(sequences.Translation(source=8), marks=SLOW),  # as many positions as the target
        pytest.param(sequences.Translation(source=3), marks=SLOW),  # the encoder runs whole
    ],
    ids=str,
)
def test_stacks_train_as_one_process(task: Task, size: int, plan: str) -> None:
    assert not differences_from_single(size, plan, task, SPEC)


@pytest.mark.slow
@pytest.mark.parametrize("task", [sequences.SharedBias(), sequences.Translation()], ids=str)
def test_stacks_in_a_pipeline(task: Task) -> None:
    assert not differences_from_single(4, "pp=2,cp=2,microbatches=2", task, SPEC)


@pytest.mark.parametrize("second", [7, pytest.param(8, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_blocks_that_are_called_twice(second: int) -> None:
    """The output of the first call is input of the second, whose sequences may be too short for slices."""
    assert not differences_from_single(2, "zero3,cp=2", sequences.Twice(second=second), SPEC)


def recompute_error(task: Task) -> str:
    with pytest.raises(PlanError) as raised:
        train_on_this_rank(task, SPEC, "cp=2,recompute=full")
    return str(raised.value)


def test_recomputation_of_two_lengths_is_refused() -> None:
    for error in ranks(2)(recompute_error, sequences.Twice()):
        assert "blocks.0 (Block) is called with sequences of 7 and 8 positions in one pass" in error


def record_lengths(task: Task) -> set[tuple[int, int]]:
    """Return the numbers of queries and keys in the slices of this rank."""
    lengths: set[tuple[int, int]] = set()

    def record(original: Any) -> Any:
        def attend(self: SlicedAttention, arguments: Any) -> Any:
            lengths.add((arguments.query.size(-2), arguments.key.size(-2)))
            return original(self, arguments)

        return attend

    train_on_this_rank(task, SPEC, "cp=2", lambda: replaced(SlicedAttention, "attend", record))
    return lengths


def test_encoder_and_decoder_run_on_slices() -> None:
    """Of 9 positions of the source and 8 of the target. The keys of cross attention are whole."""
    first, second = ranks(2)(record_lengths, sequences.Translation())
    assert first == {(5, 5), (4, 4), (4, 9)}
    assert second == {(4, 4), (4, 9)}


def plant_final_runs() -> Any:
    """Behind each stack, take the slice of a gradient of which other ranks have other parts."""

    def patch(original: Any) -> Any:
        def add(self: ContextParallel, runs: list[SlicedRun]) -> None:
            for run in runs:
                run.is_final = True
            original(self, runs)

        return add

    return replaced(ContextParallel, "_add_runs", patch)


def test_faults_between_stacks_are_detected() -> None:
    for plan in ("cp=2", "zero3,cp=2"):
        assert differences_from_single(2, plan, sequences.Translation(), SPEC, plant_final_runs)


def list_notes(task: Task, run: Path) -> list[str]:
    run.mkdir(exist_ok=True)
    events = train(SPEC, parse("cp=2"), task=task, run=RunFolder(run))
    return [event.message for event in events if isinstance(event, Noted)]


def test_blocks_on_whole_sequences_are_reported(tmp_path: Path) -> None:
    [note] = ranks(2)(list_notes, sequences.SharedBias(), tmp_path / "a")[0]
    assert "whole sequences run through blocks.0; their slices would need other numbers" in note
    assert not ranks(2)(list_notes, sequences.Translation(), tmp_path / "b")[0]


class ShortEvaluation(models.Text):
    """The evaluation has sequences of 3 positions, too few for slices of 2 ranks."""

    def dataset(self, split: str) -> models.Rows | None:
        data = super().dataset("train")
        if data is not None and split != "train":
            data.columns = {
                "tokens": data.columns["tokens"][:11, :4],
                "mask": data.columns["mask"][:11, :3],
            }
        return data


def test_too_short_sequences_of_an_evaluation_run_whole() -> None:
    spec = SPEC.model_copy(update={"evaluate_every": 2})
    assert not differences_from_single(2, "cp=2", ShortEvaluation(), spec)


@needs_transformers
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "cp=2"),
        *(
            pytest.param(size, plan, marks=SLOW)
            for size, plan in (
                (4, "cp=4"),
                (2, "zero3,cp=2,microbatches=2,recompute=full"),
                (4, "dp=2,cp=2"),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "task",
    [
        Attention(kind="vit"),  # 17 positions
        Attention(kind="bert", padded=True),
        pytest.param(Attention(kind="bert", padded=True, attention="eager"), marks=SLOW),
        pytest.param(Attention(kind="modernbert", padded=True), marks=SLOW),
        pytest.param(Attention(kind="gpt2"), marks=SLOW),
        Attention(kind="mistral", length=10),
        pytest.param(Attention(kind="mistral", padded=True), marks=SLOW),
        pytest.param(Attention(kind="gemma3"), marks=SLOW),
        Attention(kind="t5"),
        pytest.param(Attention(kind="t5", length=8, padded=True), marks=SLOW),
        pytest.param(Attention(kind="t5", attention="eager"), marks=SLOW),
        pytest.param(Attention(kind="bart", padded=True), marks=SLOW),
        pytest.param(Attention(kind="whisper"), marks=SLOW),
        pytest.param(Attention(kind="clip"), marks=SLOW),
    ],
    ids=str,
)
def test_models_of_transformers_train_as_one_process(task: Attention, size: int, plan: str) -> None:
    rtol = 1e-6 if task.kind in FLOAT32_INSIDE else 1e-10
    found = train_on_ranks(size, task, SPEC, plan)
    assert not differences(found, train_on_ranks(1, task, SPEC, "single"), rtol)


@needs_transformers
def test_dropout_in_attention_of_transformers_trains() -> None:
    """The ranks of a sequence stay equal, which `train_on_ranks` checks."""
    dropped, whole = (
        train_on_ranks(2, sequences.Gpt2(dropout=dropout), SPEC, "cp=2").losses for dropout in (0.3, 0.0)
    )
    assert relative_difference(dropped, whole) > 1e-4

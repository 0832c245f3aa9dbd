"""Batches that grow: exact in samples, equal under every plan and after a resume."""

import json
from pathlib import Path

import numpy as np
import pytest

import models
from command import succeed
from harness import differences_from_single, train_on_ranks
from paceline import Spec, train
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.order import SampleOrder
from paceline.errors import PlanError, SpecError
from paceline.plan.plan import parse
from paceline.spec import Optimizer, Schedule
from paceline.spec.batch_schedule import StepBatches, build_batches
from paceline.training.optimization.batches import check_batches, check_batches_end

BASE = {"optimizer": Optimizer(lr=0.01), "profile": False}


def spelled_out(batches: StepBatches, steps: int) -> list[int]:
    return [batches.batch_of(step) for step in range(steps)]


def test_batches_of_a_schedule() -> None:
    batches = build_batches(12, "4:10,8:20", None)
    assert spelled_out(batches, 7) == [4, 4, 4, 8, 12, 12, 12], "4 until sample 12, 8 until 20"
    assert [batches.samples_before(step) for step in range(7)] == [0, 4, 8, 12, 20, 32, 44]
    assert [batches.steps_for(samples) for samples in (0, 1, 4, 12, 13, 20, 21, 32, 33)] == [
        0, 1, 1, 3, 4, 4, 5, 5, 6
    ]  # fmt: skip
    assert [batches.next_change(step) for step in (0, 2, 3, 4, 9)] == [3, 3, 4, None, None]


def test_batches_of_a_warmup() -> None:
    batches = build_batches(32, None, "8:72")
    assert spelled_out(batches, 8) == [8, 8, 8, 16, 16, 24, 32, 32]
    assert batches.samples_before(6) == 80
    assert spelled_out(build_batches(64, None, "8:10"), 3) == [8, 48, 64], (
        "phases without a step are left out"
    )


def test_one_batch() -> None:
    batches = build_batches(8, None, None)
    assert batches.is_constant
    assert (batches.samples_before(5), batches.steps_for(33), batches.next_change(3)) == (40, 5, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_is_consumed_once_in_its_order(ranks: int) -> None:
    batches = build_batches(16, "4:12,8:40", None)
    numbers = []
    for step in range(9):
        parts = [RankBatchSlice(16, 2, rank, ranks, batches).numbers(step) for rank in range(ranks)]
        numbers += np.concatenate(parts, axis=1).ravel().tolist()
    assert numbers == list(range(batches.samples_before(9)))
    order = SampleOrder(29, 0)
    whole = [
        n for numbers, _ in training_parts(RankBatchSlice(16, 1, 0, 1, batches), order, 0, 9) for n in numbers
    ]
    rest = [
        n for numbers, _ in training_parts(RankBatchSlice(16, 1, 0, 1, batches), order, 4, 9) for n in numbers
    ]
    assert whole == numbers
    assert rest == numbers[batches.samples_before(4) :]


def test_epochs_are_those_of_the_samples() -> None:
    assert Spec(batch=12, epochs=2, batch_schedule="4:10").total_steps(29) == 7
    assert Spec(batch=12, epochs=2).total_steps(29) == 5


@pytest.mark.processes
def test_losses_are_those_of_constant_batches_in_turn() -> None:
    """The first phase equals a training with its batch; a following one differs from it."""
    growing = train_on_ranks(1, models.Points(), Spec(batch=12, steps=6, batch_schedule="4:12", **BASE))
    small = train_on_ranks(1, models.Points(), Spec(batch=4, steps=6, **BASE))
    assert growing.losses[:3] == small.losses[:3]
    assert growing.losses[3] != small.losses[3]


@pytest.mark.processes
def test_learning_rate_follows_the_batch() -> None:
    rates = {}
    for rule in ("linear", "sqrt", "none"):
        schedule = Schedule(base_batch=4, lr_scale=rule)
        spec = Spec(batch=16, steps=4, batch_schedule="4:8", schedule=schedule, **BASE)
        rates[rule] = train_on_ranks(1, models.Points(), spec).lrs
    assert rates["linear"] == pytest.approx([0.01, 0.01, 0.04, 0.04])
    assert rates["sqrt"] == pytest.approx([0.01, 0.01, 0.02, 0.02])
    assert rates["none"] == pytest.approx([0.01] * 4)


PLANS = {
    "ddp,microbatches=2": 2,
    "zero1": 2,
    "zero3,microbatches=2": 2,
    "tp=2": 2,
    "cp=2": 2,
    "dp=2,tp=2,zero=3": 4,
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [plan if plan.startswith("zero3") else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS],
)
def test_plans_train_the_same(plan: str) -> None:
    spec = Spec(batch=12, steps=7, batch_schedule="4:10,8:20", precision="fp64", **BASE)
    task = models.ShortText(depth=4)
    assert not differences_from_single(PLANS[plan], plan, task, spec)


@pytest.mark.processes
def test_resume_is_exact(tmp_path: Path) -> None:
    options = ("--set", "spec.batch_warmup=16:400", "--set", "spec.threads=1")
    words = ("train", "digits", "--ranks", "1", "--batch", "64", *options)
    succeed(*words, "--steps", "14", "--run-dir", "whole", at=tmp_path)
    succeed(*words, "--steps", "6", "--run-dir", "part", at=tmp_path)
    succeed("resume", "part", "--steps", "14", at=tmp_path)

    def steps(run: str) -> dict[int, tuple[float, int]]:
        lines = map(json.loads, (tmp_path / run / "events.jsonl").read_text().splitlines())
        return {line["step"]: (line["loss"], line["samples"]) for line in lines if line["event"] == "step"}

    assert steps("part") == steps("whole")
    batches = build_batches(64, None, "16:400")
    assert [samples for _, samples in steps("whole").values()] == [
        batches.samples_before(n) for n in range(1, 15)
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_schedule": "4"}, "must be batches and samples, such as '64:10000,128:50000'"),
        ({"batch_schedule": "4:0"}, "must be batches and samples"),
        ({"batch_schedule": "8:10,4:20"}, "growing batches below batch=12"),
        ({"batch_schedule": "12:10"}, "growing batches below batch=12"),
        ({"batch_schedule": "4:20,8:10"}, "growing numbers of samples"),
        ({"batch_schedule": "4:9,6:11"}, "batch 6 has no step"),
        ({"batch_warmup": "5:100"}, "must begin with a divisor of batch=12"),
        ({"batch_warmup": "4:9,8:20"}, "batch_warmup must be batches and samples, such as '64:10000'"),
        ({"batch_warmup": "4:9", "batch_schedule": "4:9"}, "contradict each other"),
        (
            {"batch_schedule": "4:9", "schedule": Schedule(warmup="5 steps")},
            "'5 steps' has no number of samples",
        ),
    ],
)
def test_bad_input(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(batch=12, **values)


def test_a_batch_that_the_training_does_not_reach_is_reported() -> None:
    spec = Spec(batch=12, batch_schedule="4:10,8:20")
    assert check_batches_end(spec, 5) == []
    assert check_batches_end(spec, 4) == [
        "batch_schedule reaches batch 12 after 20 samples, but the training ends after 20, with batch 8"
    ]
    [note] = check_batches_end(Spec(batch=12, batch_warmup="4:100"), 2)
    assert note.startswith("batch_warmup reaches batch 12 after 100 samples, but the training ends after 8,")
    assert check_batches_end(Spec(batch=12), 1) == []
    notes = next(iter(train(spec.model_copy(update={"steps": 2}), task=models.Points()))).notes
    assert any(note.startswith("batch_schedule reaches batch 12") for note in notes)


def test_plans_that_need_one_batch() -> None:
    spec = Spec(batch=12, batch_schedule="4:10,6:20")
    with pytest.raises(PlanError, match="batch 6 is not divisible by"):
        check_batches(spec, models.Points(), parse("ddp").resolve(4))
    for plan in ("parameter-server", "pp=3,microbatches=2"):
        with pytest.raises(PlanError, match="requires one batch; leave batch_schedule out"):
            check_batches(spec, models.Points(), parse(plan).resolve(3))


def test_tasks_that_need_one_batch() -> None:
    class Contrastive(models.Points):
        def global_loss(self, output: object, batch: object) -> object:
            return output

    with pytest.raises(SpecError, match="batch_schedule requires a loss that is a mean over samples"):
        check_batches(Spec(batch=12, batch_schedule="4:10"), Contrastive(), parse("single").resolve(1))

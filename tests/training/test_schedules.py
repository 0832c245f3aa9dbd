"""Schedules equal those of torch where torch has them, and their formulas otherwise."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as theirs

import models
from paceline import Spec, Task, events, train
from paceline.errors import SpecError, TaskError
from paceline.run import RunFolder
from paceline.spec import Optimizer, Schedule
from paceline.task import load_task
from paceline.training.optimization.plateau import PlateauState, add_evaluation
from paceline.training.optimization.schedule import check_schedule, compute_lr_factor, tokens_per_sample

TOTAL = 60


def torch_factors(make: Callable[[torch.optim.Optimizer], Any], steps: int = TOTAL) -> list[float]:
    """Return the learning rates of a scheduler of torch, whose largest rate is 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def factors(schedule: Schedule, steps: int = TOTAL, task: Task | None = None) -> list[float]:
    return [compute_lr_factor(schedule, samples, TOTAL, task) for samples in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Schedule(name="polynomial"), lambda o: theirs.PolynomialLR(o, TOTAL, 2.0)),
        (Schedule(name="polynomial", power=0.7), lambda o: theirs.PolynomialLR(o, TOTAL, 0.7)),
        (Schedule(name="milestones", milestones=(7, 30)), lambda o: theirs.MultiStepLR(o, [7, 30])),
        (
            Schedule(name="cosine-restarts", every=7, floor=0.1),
            lambda o: theirs.CosineAnnealingWarmRestarts(o, 7, eta_min=0.1),
        ),
        (
            Schedule(name="cosine-restarts", every=5, growth=2.0),
            lambda o: theirs.CosineAnnealingWarmRestarts(o, 5, 2),
        ),
        (
            # torch ends phases at the last update of each, 19 and 60.
            Schedule(name="one-cycle", warmup=19, floor=1 / 250_000),
            lambda o: theirs.OneCycleLR(o, 1.0, TOTAL + 1, pct_start=20 / (TOTAL + 1), cycle_momentum=False),
        ),
        (Schedule(name="cosine", length=40), lambda o: theirs.CosineAnnealingLR(o, 40)),
    ],
    ids=["polynomial", "power", "milestones", "restarts", "growth", "one-cycle", "length"],
)
def test_factors_equal_those_of_torch(schedule: Schedule, make: Any) -> None:
    steps = 40 if schedule.length else TOTAL
    assert factors(schedule, steps) == pytest.approx(torch_factors(make, steps), abs=1e-12)


def test_factors_by_their_formulas() -> None:
    assert factors(Schedule(name="inverse-sqrt", warmup=9))[8:12] == pytest.approx(
        [0.9, 1.0, math.sqrt(9 / 10), math.sqrt(9 / 11)]
    )
    stable = factors(Schedule(name="wsd", warmup=10, decay=20, floor=0.2), TOTAL + 1)
    assert stable[10:41] == [1.0] * 31
    assert stable[50] == pytest.approx(0.6)
    assert stable[60] == pytest.approx(0.2)
    default = factors(Schedule(name="wsd", decay_shape="1-sqrt"))
    assert default[48] == 1.0  # the last 20 %
    assert default[51] == pytest.approx(1 - math.sqrt(3 / 12))
    assert factors(Schedule(name="wsd", decay_shape="cosine"))[54] == pytest.approx(0.5)
    warm = factors(Schedule(name="cosine", warmup=10, start=0.2))
    assert warm[:11] == pytest.approx([0.2 + 0.08 * at for at in range(10)] + [1.0])
    assert factors(Schedule(name="linear", length=30))[30:32] == [0.0, 0.0]


class Falling(models.Points):
    """With a schedule of its own."""

    tokens_per_sample = 4

    def lr_factor(self, progress: float) -> float:
        return 1 - progress**2


def test_schedule_of_the_task() -> None:
    found = factors(Schedule(name="task", warmup=6), task=Falling())
    assert found[5] == pytest.approx(6 / 7)
    assert found[30] == pytest.approx(0.75)
    with pytest.raises(TaskError, match=r"schedule task requires a method lr_factor\(progress\) of Points"):
        check_schedule(Schedule(name="task"), TOTAL, models.Points())

    class Negative(models.Points):
        def lr_factor(self, progress: float) -> float:
            return -1.0

    with pytest.raises(TaskError, match=r"lr_factor\(0.5\) returned -1.0; return a factor"):
        compute_lr_factor(Schedule(name="task"), 30, TOTAL, Negative())


def test_tokens_of_the_built_in_text() -> None:
    assert tokens_per_sample(load_task("text", {"context": 64})) == 64
    assert tokens_per_sample(models.Points()) is None


def test_lengths_by_unit() -> None:
    schedule = Schedule(name="milestones", warmup="1e1 tokens", milestones=("2 steps", "1.5 epochs", 90))
    found = schedule.in_samples(10, 50, tokens=0.5)
    assert (found.warmup, found.milestones) == (20, (20, 75, 90))
    with pytest.raises(SpecError, match="'1e1 tokens' in the schedule needs the number of tokens of"):
        schedule.in_samples(10, 50)
    with pytest.raises(SpecError, match=r"schedule.milestones must increase, got 2 steps, 1.5 epochs, 90"):
        schedule.in_samples(100, 50, tokens=1)
    rates = learning_rates(Falling(), Schedule(name="linear", warmup="64 tokens"))  # 16 samples, 2 steps
    assert rates[2] == pytest.approx(1.0)
    assert rates[1] < 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "milestones"}, "schedule milestones requires schedule.milestones"),
        ({"name": "inverse-sqrt"}, "schedule inverse-sqrt requires schedule.warmup"),
        ({"power": 2.0}, "schedule.power=2.0 applies to polynomial, and the schedule is constant"),
        ({"name": "cosine", "metric": "min loss"}, "schedule.metric='min loss' applies to plateau"),
        (
            {"name": "plateau", "metric": "loss"},
            "schedule.metric must be 'min NAME' or 'max NAME'",
        ),
        ({"name": "cosine-restarts"}, "schedule.every is required by step (samples between two decays) and"),
        ({"name": "wsd", "decay": "5 days"}, "schedule.decay must be samples (an integer, at least 1)"),
        ({"name": "milestones", "milestones": [0]}, "schedule.milestones must be samples"),
        ({"start": 2.0}, "less than or equal to 1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(**options)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Schedule(name="cosine", warmup=60),
            "warmup=60 samples leaves nothing of the 60 samples",
        ),
        (
            Schedule(name="cosine", warmup=61),
            "the training, 60 samples; use a shorter warm-up, or train longer",
        ),
        (Schedule(name="cosine", warmup=9, length=9), "warmup=9 samples leaves nothing of the 9 samples"),
        (
            Schedule(name="milestones", milestones=(7, 60)),
            "milestones has 60 samples, but the",
        ),
        (Schedule(name="inverse-sqrt", warmup="0 samples").in_samples(8, 50), "warmup, which is 0 samples"),
        (
            Schedule(name="wsd", warmup=30, decay=31),
            "warmup=30 and schedule.decay=31 samples are longer",
        ),
    ],
)
def test_schedules_longer_than_the_training_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_schedule(schedule, TOTAL)


def learning_rates(task: Task, schedule: Schedule, **options: Any) -> list[float]:
    spec = Spec(
        batch=8, steps=7, optimizer=Optimizer(name="sgd", lr=1.0), schedule=schedule, seed=3, **options
    )
    return [event.lr for event in train(spec, task=task) if isinstance(event, events.Step)]


def test_plateau_counts_evaluations() -> None:
    schedule = Schedule(name="plateau", patience=2, factor=0.5, floor=0.2, min_delta=0.1)
    state, found = PlateauState("max accuracy"), []
    for accuracy in (0.5, 0.55, 0.58, 0.7, math.nan, 0.7, 0.75, 0.7, 0.7, 0.7):
        state = add_evaluation(schedule, state, {"accuracy": accuracy})
        found.append(state.factor)
    assert found == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2]
    with pytest.raises(
        SpecError, match=r"schedule.metric='max accuracy', but the evaluation has no accuracy"
    ):
        add_evaluation(schedule, state, {"loss": 1.0})


def test_plateau_lowers_the_rate_and_resumes(tmp_path: Path) -> None:
    """A metric that never improves by min_delta lowers the rate after every two evaluations."""
    schedule = Schedule(name="plateau", patience=2, factor=0.5, min_delta=100.0)

    def rates(steps: int, run: RunFolder | None) -> list[float]:
        spec = Spec(
            batch=8,
            steps=steps,
            evaluate_every=1,
            optimizer=Optimizer(lr=1e-3),
            schedule=schedule,
        )
        return [
            event.lr for event in train(spec, task=models.Images(), run=run) if isinstance(event, events.Step)
        ]

    expected = [1e-3, 1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]
    assert rates(7, None) == pytest.approx(expected)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert rates(4, run) + rates(7, run) == pytest.approx(expected)


def test_plateau_without_evaluations_is_refused() -> None:
    with pytest.raises(SpecError, match="schedule plateau requires evaluations, but the task"):
        learning_rates(models.Points(), Schedule(name="plateau"))


def test_another_length_on_resume_is_reported(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()

    def notes(steps: int, **schedule: Any) -> str:
        spec = Spec(batch=8, steps=steps, schedule=Schedule(name="cosine", **schedule))
        return " ".join(next(iter(train(spec, task=models.Points(), run=run))).notes)

    list(train(Spec(batch=8, steps=2, schedule=Schedule(name="cosine")), task=models.Points(), run=run))
    assert "length of the schedule was 2 steps, is 4 steps" in notes(4)
    assert "length of the schedule" not in notes(4, length="2 steps")


@pytest.mark.parametrize(("length", "count"), [("7 steps", 0), ("8 steps", 1)])
def test_a_schedule_that_does_not_reach_its_end_is_reported(length: str, count: int) -> None:
    spec = Spec(batch=8, steps=7, schedule=Schedule(name="linear", length=length))
    [*notes] = (note for note in next(iter(train(spec, task=models.Points()))).notes if "schedule" in note)
    assert len(notes) == count
    assert all(
        note.startswith("schedule.length=64 samples is longer than the training, 56") for note in notes
    )

"""Schedules of learning rate and batch over a stop and a resume under another plan."""

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from faults import replaced
from harness import ranks, relative_difference, to_whole_array
from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task, train
from paceline.distributed.dtensor import is_materialized
from paceline.events import Step
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save, Schedule
from paceline.training import loop

STEPS, RESUMED, BATCH = 14, 5, 12


class Falling(Task):
    """A regression with a schedule of its own, which uses the step and the epoch, too."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def lr_factor(self, progress: float, step: int, epoch: int) -> float:
        return (1 - 0.9 * progress) * 0.99**step * 0.8**epoch


def scheduled(name: str, **options: Any) -> dict[str, Any]:
    return {"schedule": Schedule(name=name, **options)}


SCALED = {"schedule": Schedule(name="linear", warmup=20, base_batch=6, lr_scale="sqrt")}
RECIPES: dict[str, dict[str, Any]] = {
    "cosine": scheduled("cosine", warmup="3 steps", floor=0.1),
    "wsd": scheduled("wsd", warmup=20, decay="9 steps", decay_shape="1-sqrt"),
    "milestones": scheduled("milestones", milestones=["3 steps", "1.5 epochs", 75], factor=0.5),
    "one-cycle": scheduled("one-cycle"),
    "inverse-sqrt": scheduled("inverse-sqrt", warmup=30),
    "restarts": scheduled("cosine-restarts", every="2 steps", growth=1.7),
    "polynomial": scheduled("polynomial", length="11 steps", power=1.5),
    "step": scheduled("step", every="4 steps", factor=0.7),
    "task": scheduled("task", warmup=15),
    "batch-schedule": {**SCALED, "batch_schedule": "4:14,6:40"},
    "batch-warmup": {**SCALED, "batch_warmup": "4:50"},
}
BATCHES = ("batch-schedule", "batch-warmup")  # refused by pp
QUICK = ("cosine", "task", "batch-schedule")


def train_each(
    plan: str,
    recipes: list[str],
    folder: str,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, tuple[int, dict[str, Any], list[tuple[int, int, float]]]]:
    """Train, and return first step, weights, and step, samples and learning rate of each step."""
    found = {}
    for recipe in recipes:
        run = RunFolder(Path(folder) / recipe)
        run.path.mkdir(parents=True, exist_ok=True)
        spec = Spec(
            steps=STEPS,
            batch=BATCH,
            seed=1,
            precision="fp64",
            profile=False,
            save=Save(every=RESUMED, minutes=math.inf, keep=9),
            optimizer=Optimizer(lr=0.02, weight_decay=0.05),
            **RECIPES[recipe],
        )
        observed: list[nn.Module] = []
        with fault():
            events = list(
                train(
                    spec,
                    plan,
                    task=Falling(),
                    run=run,
                    observe=lambda model, *_, observed=observed: observed.append(model),
                )
            )
        weights = {
            name: to_whole_array(parameter)
            for name, parameter in observed[-1].named_parameters()
            if is_materialized(parameter)
        }
        steps = [(event.step, event.samples, event.lr) for event in events if isinstance(event, Step)]
        found[recipe] = events[0].step, weights, steps
    return found


def resume(
    first: tuple[int, str],
    second: tuple[int, str],
    recipes: list[str],
    folder: str,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, tuple[float, bool]]:
    """Return the largest difference of the weights, and whether steps, samples and rates are the same."""
    [expected] = ranks(1)(train_each, "single", recipes, f"{folder}/single")
    before = ranks(first[0])(train_each, first[1], recipes, f"{folder}/run")
    for recipe in recipes:
        run = RunFolder(Path(folder, "run", recipe))
        assert run.checkpoints() == [5, 10, 14]
        for step in (10, 14):  # as if the training had ended before
            shutil.rmtree(run.checkpoint(step))
    after = ranks(second[0])(train_each, second[1], recipes, f"{folder}/run", fault)
    found = {}
    for recipe in recipes:
        _, weights, steps = expected[recipe]
        assert after[0][recipe][0] == RESUMED
        resumed: dict[str, Any] = {}
        for of_rank in after:
            resumed |= of_rank[recipe][1]
        both = before[0][recipe][2][:RESUMED] + after[0][recipe][2]
        is_same = both == [pytest.approx(step, rel=1e-10) for step in steps]
        found[recipe] = (
            max(relative_difference(resumed[name], value) for name, value in weights.items()),
            is_same,
        )
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second", "recipes"),
    [
        ((2, "ddp"), (2, "zero3"), QUICK),
        pytest.param((2, "ddp"), (2, "zero3"), tuple(RECIPES), marks=pytest.mark.slow),
        pytest.param((2, "zero1"), (2, "tp=2"), tuple(RECIPES), marks=pytest.mark.slow),
        pytest.param(
            (2, "pp=2,microbatches=2"),
            (2, "ddp"),
            tuple(recipe for recipe in RECIPES if recipe not in BATCHES),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["quick", "ddp-zero3", "zero1-tp", "pp-ddp"],
)
def test_a_resume_under_another_plan(
    first: tuple[int, str], second: tuple[int, str], recipes: tuple[str, ...], tmp_path: Path
) -> None:
    found = resume(first, second, list(recipes), str(tmp_path))
    assert {recipe: found[recipe] for recipe in recipes if not found[recipe][0] <= 1e-10} == {}
    assert all(is_same for _, is_same in found.values()), found


def begins_again() -> Any:
    """Count the samples of the schedule from the first step of this start."""
    first: list[int] = []

    def patch(original: Any) -> Any:
        def compute(schedule: Any, samples: int, *others: Any) -> float:
            first.append(samples)
            return original(schedule, samples - first[0], *others)

        return compute

    return replaced(loop, "compute_lr_factor", patch)


@pytest.mark.processes
def test_a_schedule_that_begins_again_is_caught(tmp_path: Path) -> None:
    [(error, is_same)] = resume(
        (1, "single"), (1, "single"), ["cosine"], str(tmp_path), begins_again
    ).values()
    assert error > 1e-6
    assert not is_same

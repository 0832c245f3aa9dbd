"""Limits, skipped updates, averages and plateaus together, over a resume under another plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from faults import replaced
from harness import ranks, relative_difference, to_whole_array
from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task, train
from paceline.distributed.dtensor import is_materialized
from paceline.events import Evaluated, Step
from paceline.run import RunFolder
from paceline.spec import Optimizer, Schedule
from paceline.training.loop import TrainingLoop
from paceline.training.optimization import adaptive_clipping
from paceline.training.step.weight_operations import WeightOperations

STEPS, RESUMED = 9, 4


class OneNaN(Task):
    """A regression with a sample that makes the loss of one rank NaN."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3))

    def dataset(self, split: str) -> Pairs:
        x = random_normal(SAMPLES, 5)
        if split == "train":
            x[4] = torch.nan
        return Pairs(x=x, y=random_normal(SAMPLES, 3, seed=1))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()


def train_in(
    plan: str,
    steps: int,
    folder: str,
    average: dict[str, Any],
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[dict[str, Any], list[Any]]:
    run = RunFolder(Path(folder))
    run.path.mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(
        name="lamb", lr=0.02, weight_decay=0.05, clip=0.5, clip_value=0.1, agc=0.05, on_nan="skip", **average
    )
    spec = Spec(
        steps=steps,
        batch=12,
        seed=1,
        precision="fp64",
        evaluate_every=1,
        optimizer=optimizer,
        schedule=Schedule(name="plateau", patience=1, factor=0.5, min_delta=0.5),
    )
    observed: list[nn.Module] = []
    with fault():
        events = list(
            train(spec, plan, task=OneNaN(), run=run, observe=lambda model, *_: observed.append(model))
        )
    weights = {
        name: to_whole_array(parameter)
        for name, parameter in observed[-1].named_parameters()
        if is_materialized(parameter)
    }
    steps_made = [[event.step, event.loss, event.lr] for event in events if isinstance(event, Step)]
    return weights, steps_made + [[e.step, e.metrics["loss"]] for e in events if isinstance(e, Evaluated)]


def compare(
    average: dict[str, Any],
    first: tuple[int, str],
    second: tuple[int, str],
    folder: Path,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[float, bool]:
    """Return the largest difference of the weights, and whether steps and evaluations are the same.

    fault: in the resumed training.
    """
    [(expected, series)] = ranks(1)(train_in, "single", STEPS, str(folder / "single"), average)
    steps = [entry for entry in series if len(entry) == 3]
    assert len(steps) < STEPS  # some updates were skipped
    assert len({lr for _, _, lr in steps}) > 1  # the plateau was reached
    before = ranks(first[0])(train_in, first[1], RESUMED, str(folder / "resumed"), average)
    after = ranks(second[0])(train_in, second[1], STEPS, str(folder / "resumed"), average, fault)
    weights: dict[str, Any] = {}
    for of_rank, _ in after:
        weights |= of_rank
    error = max(relative_difference(weights[name], value) for name, value in expected.items())
    found = sorted(before[0][1] + after[0][1], key=by_kind)
    pairs = zip(found, sorted(series, key=by_kind), strict=True)
    return error, all(entry == pytest.approx(other, rel=1e-10) for entry, other in pairs)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("average", "first", "second"),
    [
        ({"ema": 0.8}, (3, "zero3"), (2, "pp=2,microbatches=2")),
        ({"swa": 3, "swa_every": 2}, (2, "tp=2,microbatches=2"), (3, "zero3")),
    ],
    ids=["ema", "swa"],
)
def test_a_resume_under_another_plan(
    average: dict[str, Any], first: tuple[int, str], second: tuple[int, str], tmp_path: Path
) -> None:
    error, is_same = compare(average, first, second, tmp_path)
    assert error <= 1e-10
    assert is_same


# Negative controls: defects in the resumed training


def restarted_averages() -> AbstractContextManager[None]:
    """Let the averages begin again with the weights of the checkpoint."""

    def patch(original: Any) -> Any:
        def apply(self: WeightOperations, step: int) -> None:
            if step == RESUMED + 1:
                self.restart_averages()
            original(self, step)

        return apply

    return replaced(WeightOperations, "__call__", patch)


def forgotten_plateau() -> AbstractContextManager[None]:
    """Let the learning rate begin again."""

    def patch(original: Any) -> Any:
        return lambda self, *args: original(self, *args) / self.plateau.factor

    return replaced(TrainingLoop, "_compute_lr_factor", patch)


def norms_of_shards() -> AbstractContextManager[None]:
    """Clip each row by the norms of the shards."""

    def patch(original: Any) -> Any:
        return lambda params, parts: [list(of_group) for of_group in parts]

    return replaced(adaptive_clipping, "sum_shards", patch)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "changes_weights"),
    [(restarted_averages, False), (forgotten_plateau, True), (norms_of_shards, True)],
    ids=["averages", "plateau", "agc"],
)
def test_defects_are_caught(fault: Any, changes_weights: bool, tmp_path: Path) -> None:
    error, is_same = compare({"ema": 0.8}, (1, "single"), (2, "zero3"), tmp_path, fault)
    assert not is_same
    assert (error > 1e-6) == changes_weights


def by_kind(entry: list[float]) -> tuple[int, float]:
    """Order steps after evaluations."""
    return len(entry), entry[0]

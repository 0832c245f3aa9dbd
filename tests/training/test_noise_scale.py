"""The gradient noise scale: known covariances, every plan, and trainings that it does not change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from command import succeed
from harness import ranks
from paceline import Spec, Task, train
from paceline.errors import PlanError, SpecError
from paceline.events import NoiseMeasured, Step
from paceline.plan.plan import parse
from paceline.spec import Optimizer, Save
from paceline.training.step import noise_scale
from paceline.training.step.noise_scale import draw_signs, estimate_ratio

SAMPLES, DIMS, BATCH = 8192, 256, 32
MEAN = 0.25  # of each element, so that |G|² = 16
SPREADS = torch.linspace(0.5, 1.5, DIMS)


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIMS))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.weight


class Quadratic(Task):
    """|x - w|²/2, so that the gradient of a sample is w - x; w stays 0."""

    samples: int = SAMPLES

    def model(self) -> nn.Module:
        return Offset()

    def dataset(self, split: str) -> models.Pairs | None:
        x = MEAN + SPREADS * models.random_normal(self.samples, DIMS)
        return models.Pairs(x=x) if split == "train" else None

    def inputs(self, batch: Any) -> Tensor:
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum(1) / 2


SPEC = Spec(
    batch=BATCH,
    steps=101,
    optimizer=Optimizer(name="sgd", lr=1e-12),
    save=Save(minutes=float("inf")),
    profile=False,
    precision="fp64",
    noise_scale=2,
)


def measure(task: Task, spec: Spec, plan: str) -> tuple[list[tuple[float, float | None]], list[Any]]:
    """Train on this rank. Return loss and norm of each step, and the measurements."""
    events = list(train(spec, parse(plan), task=task, device="cpu"))
    return (
        [(event.loss, event.grad_norm) for event in events if isinstance(event, Step)],
        [event for event in events if isinstance(event, NoiseMeasured)],
    )


def true_scale(samples: int = SAMPLES) -> float:
    """Return tr Σ / |G|² of the samples, from the samples alone."""
    x = Quadratic(samples=samples).dataset("train").columns["x"].double().numpy()
    return float(x.var(0).sum() / np.square(x.mean(0)).sum())


def test_estimate_of_a_known_covariance() -> None:
    _, measured = measure(Quadratic(), SPEC, "dp=1,microbatches=2")
    assert [event.step for event in measured] == list(range(2, 101, 2))
    assert measured[-1].noise_scale == pytest.approx(true_scale(), rel=0.05)
    assert 0.005 < measured[-1].error < 0.05
    assert measured[0].error is None
    variances = np.mean([event.variance for event in measured])
    assert variances == pytest.approx(float(SPREADS.square().sum()), rel=0.05)


def test_a_small_data_set_is_a_sample_of_its_distribution() -> None:
    """The mean gradient of N samples has the noise tr Σ / N, which does not count as gradient."""
    samples = 128
    _, measured = measure(Quadratic(samples=samples), SPEC, "dp=1,microbatches=2")
    scale = np.mean([event.variance for event in measured]) / np.mean(
        [event.squared_gradient for event in measured]
    )
    of_samples = true_scale(samples)
    assert scale == pytest.approx(1 / (1 / of_samples - 1 / samples), rel=0.03)
    assert scale > 1.08 * of_samples


def test_signs_that_do_not_cancel_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_scale, "draw_signs", lambda seed, step, parts: np.ones(parts))
    _, measured = measure(Quadratic(), SPEC.model_copy(update={"steps": 21}), "dp=1,microbatches=2")
    assert measured[-1].noise_scale is None or measured[-1].noise_scale > 1.5 * true_scale()


@pytest.mark.processes
@pytest.mark.slow
def test_estimate_on_two_ranks_with_shards() -> None:
    for (_, measured), (_, other) in [ranks(2)(measure, Quadratic(), SPEC, "zero3")]:
        assert measured[-1].noise_scale == pytest.approx(true_scale(), rel=0.05)
        assert measured[-1].noise_scale == other[-1].noise_scale


def without_times(measured: list[NoiseMeasured]) -> np.ndarray:
    return np.array([(event.step, event.variance, event.squared_gradient) for event in measured])


SMALL = SPEC.model_copy(update={"batch": 24, "steps": 7, "optimizer": Optimizer(lr=0.01)})
PLANS = {
    "ddp,microbatches=2": 2,
    "zero1,microbatches=2": 2,
    "zero3,microbatches=2": 2,
    "tp=2,microbatches=4": 2,
    "cp=2,microbatches=4": 2,
    "pp=2,microbatches=4": 2,
    "pp=2,pp_schedule=zbv,microbatches=4": 2,
    "zero3": 4,
    "dp=2,tp=2,zero=3,microbatches=2": 4,
}
QUICK = ("zero3,microbatches=2",)


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_plans_measure_the_same_and_train_the_same(plan: str) -> None:
    task = models.ShortText(depth=4)
    steps, expected = measure(task, SMALL, "dp=1,microbatches=4")
    assert [event.step for event in expected] == [2, 4, 6]
    plain = SMALL.model_copy(update={"noise_scale": None})
    counted = ranks(PLANS[plan])(measure, task, SMALL, plan)
    without = ranks(PLANS[plan])(measure, task, plain, plan)
    assert [found for found, _ in counted] == [found for found, _ in without], (
        "measuring changes the training"
    )
    for _, measured in counted:
        np.testing.assert_allclose(without_times(measured), without_times(expected), rtol=1e-9)
    np.testing.assert_allclose(counted[0][0], steps, rtol=1e-9)


@pytest.mark.slow
def test_dropout_and_running_statistics_are_those_of_a_plain_training() -> None:
    plan = "dp=1,microbatches=2"
    for task in (models.NormedImages(), models.Text()):
        spec = SMALL.model_copy(update={"precision": "fp32"})
        measured, found = measure(task, spec, plan)
        plain, none = measure(task, spec.model_copy(update={"noise_scale": None}), plan)
        assert measured == plain
        assert len(found) == 3
        assert not none


def test_signs_are_balanced() -> None:
    for parts in (2, 3, 4, 9):
        drawn = np.array([draw_signs(0, step, parts) for step in range(40)])
        assert np.all(drawn.sum(1) == 0)
        assert np.all(np.count_nonzero(drawn, axis=1) == parts // 2 * 2)
        assert len(np.unique(drawn, axis=0)) > 1


def test_ratio_of_means() -> None:
    assert estimate_ratio([(4.0, 2.0)]) == (2.0, None)
    assert estimate_ratio([(4.0, -2.0), (4.0, 1.0)]) == (None, None)
    value, error = estimate_ratio([(4.0, 1.0), (8.0, 3.0)])
    assert value == 3.0
    assert error == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("plan", "message"),
    [("single", "add microbatches=2"), ("local-sgd,period=2", "other weights on each rank")],
)
def test_plans_without_parts_are_refused(plan: str, message: str) -> None:
    with pytest.raises((PlanError, SpecError), match=message):
        measure(Quadratic(), SPEC, plan)


@pytest.mark.processes
def test_command(tmp_path: Path) -> None:
    words = "train digits --steps 6 --noise-scale 2 --plan microbatches=2 --ranks 1 --run-dir run"
    done = succeed(*words.split(), at=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["event"] == "noisemeasured"]
    assert [line["step"] for line in measured] == [2, 4, 6]
    assert measured[-1]["variance"] > 0
    assert "noise scale" in done.out
    assert "noise scale" in succeed("show", "run", at=tmp_path).out

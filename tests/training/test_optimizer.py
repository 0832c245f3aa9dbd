"""Schedules are counted in samples; gradient norm, clipping and updates match torch."""

import copy

import pytest
import torch
from torch import nn

import models
from harness import relative_difference
from paceline import Spec, events, train
from paceline.errors import SpecError, TaskError
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.spec import Optimizer, Schedule
from paceline.training.optimization.gradient_norm import GradientNorm, combine_norms
from paceline.training.optimization.optimizer import make_optimizer
from paceline.training.optimization.schedule import check_schedule, compute_lr_factor
from paceline.training.step.step import TrainingStep

CPU = torch.device("cpu")
ALONE, FIRST = ResolvedPlan(), MeshCoordinate(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), {0: 1, 50: 1, 100: 1}),
        (Schedule(warmup=9), {0: 0.1, 4: 0.5, 8: 0.9, 9: 1, 100: 1}),
        (
            Schedule(name="cosine"),
            {0: 1, 25: 0.8535533905932737, 50: 0.5, 75: 0.14644660940672627, 100: 0, 101: 0},
        ),
        (Schedule(name="cosine", floor=0.2), {0: 1, 25: 0.882842712474619, 50: 0.6, 100: 0.2}),
        (
            Schedule(name="cosine", warmup=20),
            {0: 1 / 21, 19: 20 / 21, 20: 1, 60: 0.5, 80: 0.14644660940672627, 100: 0},
        ),
        (Schedule(name="linear"), {0: 1, 25: 0.75, 100: 0, 120: 0}),
        (Schedule(name="linear", warmup=20, floor=0.5), {9: 10 / 21, 20: 1, 60: 0.75, 100: 0.5}),
        (Schedule(name="step", every=30), {0: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 90: 0.001}),
        (
            Schedule(name="step", every=40, factor=0.5, warmup=10),
            {0: 1 / 11, 10: 1, 39: 1, 40: 0.5, 80: 0.25},
        ),
        (Schedule(name="cosine", warmup=100), {99: 100 / 101, 100: 1}),
    ],
)
def test_lr_factors(schedule: Schedule, expected: dict[int, float]) -> None:
    assert {samples: compute_lr_factor(schedule, samples, 100) for samples in expected} == pytest.approx(
        expected, abs=1e-15
    )


def test_warmup_longer_than_training_is_refused() -> None:
    check_schedule(Schedule(warmup=100), 100)
    with pytest.raises(SpecError, match=r"warmup=101 samples is longer than the training, 100 samples"):
        check_schedule(Schedule(warmup=101), 100)


def with_gradients(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = models.Gpt().to(dtype)
    model.spare = nn.Parameter(torch.ones(3, dtype=dtype))  # without a gradient
    model.none = nn.Parameter(torch.ones(0, dtype=dtype))
    model(models.random_integers(11, 4, 5)).square().sum().backward()
    model.none.grad = torch.zeros_like(model.none)
    return model


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_norm_matches_torch(dtype: torch.dtype, rtol: float) -> None:
    model = with_gradients(dtype)
    params = list(model.parameters())
    global_norm, local_norms = (
        GradientNorm(params, ALONE, FIRST, CPU).global_norm(),
        GradientNorm(params, ALONE, FIRST, CPU).local_norms(),
    )
    expected = torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert relative_difference(global_norm, expected) < rtol
    assert relative_difference(combine_norms(local_norms, CPU), expected) < rtol


def test_each_gradient_is_counted_on_one_rank() -> None:
    params = list(with_gradients(torch.float64).parameters())
    whole = GradientNorm(params, ALONE, FIRST, CPU).global_norm()
    for ranks in (2, 3, 100):
        parts = [
            GradientNorm(params, ResolvedPlan(dp=ranks), MeshCoordinate(0, rank, 0, 0), CPU).local_norms()
            for rank in range(ranks)
        ]
        assert (
            relative_difference(sum(norm.square() for part in parts for norm in part), whole.square()) < 1e-15
        )


def test_norm_without_gradients_is_zero() -> None:
    norm = GradientNorm([nn.Parameter(torch.ones(3))], ALONE, FIRST, CPU)
    assert norm.global_norm() == 0
    assert norm.local_norms() == []


OPTIMIZERS = [
    (Optimizer(name="sgd", lr=0.1, momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
    (
        Optimizer(name="sgd", lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ),
    (
        Optimizer(name="sgd", lr=0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    (
        Optimizer(name="adamw", lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1),
    ),
    (Optimizer(), lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.0)),
]


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize(("spec", "oracle"), OPTIMIZERS)
def test_update_matches_torch(spec: Optimizer, oracle: object, clip: float | None) -> None:
    """Make three updates with changing learning rates, two of them with a parameter without gradient."""
    model = models.Gpt().double()
    twin = copy.deepcopy(model)
    theirs = oracle(twin.parameters())  # type: ignore[operator]
    params = list(model.parameters())
    ours = make_optimizer(models.Text(), spec, ResolvedPlan(), model)
    step = TrainingStep(
        models.Text(), model, ours, params, ALONE, FIRST, torch.device("cpu"), "fp64", clip, 0
    )
    for at, lr_factor in enumerate((1.0, 0.5, 0.25)):
        tokens = models.random_integers(11, 4, 5, seed=at)
        for copied in (model, twin):
            copied(tokens).square().sum().backward()
            if at < 2:
                copied.blocks[0].norm.bias.grad = None
        for group in theirs.param_groups:
            group["lr"] = spec.lr * lr_factor
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        theirs.step()
        theirs.zero_grad()
        step.update(lr_factor, 0)
        assert all(parameter.grad is None for parameter in params)
        for parameter, expected in zip(params, twin.parameters(), strict=True):
            assert relative_difference(parameter.detach(), expected.detach()) < 1e-14


def test_optimizer_gets_only_trained_parameters() -> None:
    model = models.Frozen().model()
    optimizer = make_optimizer(models.Frozen(), Optimizer(), ResolvedPlan(), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
    model.requires_grad_(False)
    with pytest.raises(TaskError, match="no parameter to train"):
        make_optimizer(models.Frozen(), Optimizer(), ResolvedPlan(), model)


def test_warmup_in_steps_or_epochs_is_converted_to_samples() -> None:
    """A training has 8 samples per step and 29 per epoch."""

    def rates(warmup: int | str) -> list[float]:
        spec = Spec(task="models:Text", batch=8, steps=7, schedule=Schedule(name="cosine", warmup=warmup))
        return [event.lr for event in train(spec) if isinstance(event, events.Step)]

    assert rates("3 steps") == rates(24) != rates(0)
    assert rates("1 epoch") == rates(29) == rates("1.0 epochs")
    with pytest.raises(
        SpecError, match=r"schedule.warmup=58 samples is longer than the training, 56 samples"
    ):
        rates("2 epochs")

"""Limits of gradients, skipped updates and averages equal a loop by hand under every plan."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from faults import replaced
from harness import TrainingResult, ranks, relative_difference, train_on_ranks, train_on_this_rank
from paceline import Spec, Update, events, train
from paceline.after_step import Ema, Swa
from paceline.data.order import shuffle
from paceline.errors import DivergedError, PlanError, SpecError, TaskError
from paceline.plan.plan import ResolvedPlan, parse
from paceline.spec import Optimizer
from paceline.training.optimization import adaptive_clipping
from paceline.training.optimization.read_updates import read_updates
from paceline.training.step.weight_operations import read_operations

STEPS, BATCH, LR = 6, 8, 0.1
LIMITS: dict[str, dict[str, Any]] = {
    "value": {"clip_value": 0.01},
    "agc": {"agc": 0.02, "no_agc": "6.*"},
    "all": {"clip": 0.5, "clip_value": 0.05, "agc": 0.1},
}


class Mixed(models.Images):
    """Convolutions, matrices and vectors, with weights of different sizes."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(108, 6),
            nn.Tanh(),
            nn.Tanh(),
            nn.Linear(6, 7),
        )
        with torch.no_grad():
            for at, parameter in enumerate(model.parameters()):
                values = torch.arange(1, parameter.numel() + 1).double() * (1.7 + at)
                parameter.copy_(values.sin().view_as(parameter) / 3)
            model[0].bias.zero_()
        return model


def request(**options: Any) -> Spec:
    optimizer = Optimizer(name="sgd", lr=LR, momentum=0.0, **options)
    return Spec(steps=STEPS, batch=BATCH, seed=3, precision="fp64", optimizer=optimizer)


def limit_by_hand(name: str, parameter: nn.Parameter, options: dict[str, Any]) -> Tensor:
    grad = parameter.grad
    limit = torch.tensor(options.get("clip_value", 1e9), dtype=torch.float64)
    grad = torch.minimum(torch.maximum(grad, -limit), limit)
    if "agc" not in options or ("no_agc" in options and name.startswith("6.")):
        return grad
    units = [()] if parameter.dim() < 2 else [(row,) for row in range(len(parameter))]
    limited = grad.clone()
    for unit in units:
        bound = options["agc"] * max(1e-3, float(parameter[unit].norm()))
        if (norm := float(grad[unit].norm())) > bound:
            limited[unit] = grad[unit] * bound / norm
    return limited


@cache
def train_by_hand(limits: str) -> dict[str, np.ndarray]:
    options, model = LIMITS[limits], Mixed().model().double()
    data = Mixed().dataset("train").columns
    x, y = data["x"].double(), data["y"]
    for step in range(STEPS):
        indices = shuffle(np.arange(step * BATCH, (step + 1) * BATCH), models.SAMPLES, 3).tolist()
        model.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        with torch.no_grad():
            limited = {name: limit_by_hand(name, p, options) for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter -= LR * limited[name]
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def train_each(plan: str, limits: list[str], fault: Any) -> dict[str, dict[str, np.ndarray]]:
    more = [fault] if fault is not None else []
    return {key: train_on_this_rank(Mixed(), request(**LIMITS[key]), plan, *more).weights for key in limits}


def differences_by_hand(size: int, plan: str, limits: list[str], fault: Any = None) -> dict[str, float]:
    on_ranks = ranks(size)(train_each, plan, limits, fault) if size > 1 else [train_each(plan, limits, fault)]
    found = {}
    for key in limits:
        weights: dict[str, np.ndarray] = {}
        for rank in on_ranks:
            weights |= rank[key]
        expected = train_by_hand(key)
        found[key] = max(relative_difference(weights[name], expected[name]) for name in expected)
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def test_limits_equal_a_loop_by_hand() -> None:
    assert max(differences_by_hand(1, "single", [*LIMITS]).values()) < 1e-12


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero3"),
        (2, "tp=2"),
        slow(2, "ddp"),
        slow(2, "zero1"),
        slow(2, "zero2"),
        slow(2, "pp=2"),
        slow(4, "dp=2,tp=2,zero=3"),
        slow(4, "hsdp"),
    ],
)
def test_limits_are_the_same_under_every_plan(size: int, plan: str) -> None:
    found = differences_by_hand(size, plan, [*LIMITS])
    assert max(found.values()) < 1e-10, found


def norms_of_shards() -> Any:
    def patch(original: Any) -> Any:
        return lambda params, parts: [list(of_group) for of_group in parts]

    return replaced(adaptive_clipping, "sum_shards", patch)


@pytest.mark.processes
def test_norms_of_shards_are_caught() -> None:
    assert differences_by_hand(2, "zero3", ["agc"], norms_of_shards)["agc"] > 1e-6


class Broken(models.Points):
    """With a gradient that is not finite at some samples."""

    bad: tuple[int, ...] = ()

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        if data is not None:
            for index in self.bad:
                data.columns["x"][index] = float("inf")
        return data


def sample_of_step(step: int) -> int:
    """Return a sample of the batch after `step` steps, and of no other batch of the first epoch."""
    return int(shuffle(np.arange(step * BATCH, (step + 1) * BATCH), models.SAMPLES, 3)[3])


def skipping(**options: Any) -> Spec:
    optimizer = Optimizer(name="sgd", lr=LR, momentum=0.0, on_nan="skip", **options)
    return Spec(steps=3, batch=BATCH, seed=3, precision="fp64", optimizer=optimizer)


def test_an_update_with_nan_is_skipped() -> None:
    """A training in which the second update is skipped ends as one that makes only the others."""
    task = Broken(bad=(sample_of_step(1),))
    found: list[events.Event] = []
    kept: list[nn.Module] = []
    for event in train(skipping(), task=task, observe=lambda trained, what, step: kept.append(trained)):
        found.append(event)
    steps = [event.step for event in found if isinstance(event, events.Step)]
    notes = [event for event in found if isinstance(event, events.Noted)]
    assert steps == [1, 3]
    assert [note.step for note in notes] == [2]
    assert "step 2: the loss is" in notes[0].message
    assert all(bool(parameter.isfinite().all()) for parameter in kept[-1].parameters())
    with pytest.raises(DivergedError, match="at step 2"):
        list(train(skipping().model_copy(update={"optimizer": Optimizer(name="sgd")}), task=task))


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_all_ranks_skip_the_same_updates(plan: str) -> None:
    task = Broken(bad=(sample_of_step(1),))
    expected = train_on_ranks(1, task, skipping(), "single")
    found: TrainingResult = train_on_ranks(2, task, skipping(), plan)
    for name, weights in expected.weights.items():
        assert np.isfinite(weights).all()
        assert relative_difference(found.weights[name], weights) < 1e-12


def test_a_training_stops_after_too_many_skipped_updates() -> None:
    task = Broken(bad=tuple(range(models.SAMPLES)))
    spec = skipping().model_copy(update={"steps": 14})
    with pytest.raises(DivergedError, match="at step 11"):
        list(train(spec, task=task))


class Overflow(nn.Module):
    """Passes its input on, and infinite gradients back after `finite` passes."""

    def __init__(self, finite: int):
        super().__init__()
        self.left = finite

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.left -= 1
            if self.left < 0:
                x.register_hook(lambda grad: grad / 0)
        return x


class Infinite(models.Points):
    """With finite losses, and infinite gradients from a step on."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Overflow(3))


@pytest.mark.parametrize(
    ("precision", "on_nan", "step", "skipped"),
    [
        ("fp64", "stop", 4, ""),
        ("fp64", "skip", 14, ", after 10 updates"),
        ("fp16", "stop", 44, ", after 40 updates"),
    ],
)
def test_a_gradient_that_stays_infinite_stops_the_training(
    precision: str, on_nan: str, step: int, skipped: str
) -> None:
    spec = skipping().model_copy(update={"precision": precision, "steps": 60})
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"on_nan": on_nan})})
    with pytest.raises(DivergedError, match=f"norm of the gradient is (inf|nan) at step {step}{skipped}"):
        list(train(spec, task=Infinite()))


class Gain(nn.Module):
    def __init__(self, gain: float):
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


class Loud(models.Points):
    """With gradients of activations that overflow in fp16, until the loss scale is small."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Gain(1 / 300), Gain(300.0))


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_plans_skip_the_same_updates_in_fp16(plan: str) -> None:
    """The loss scale does not depend on the ranks, so gradients of activations overflow in the same steps."""
    spec = Spec(steps=14, batch=BATCH, precision="fp16", optimizer=Optimizer(name="sgd", lr=LR))
    norms = [
        np.array(train_on_ranks(size, Loud(), spec, name).grad_norms, dtype=float)
        for size, name in ((1, "single"), (2, plan))
    ]
    skipped = [(~np.isfinite(found)).tolist() for found in norms]
    assert skipped[0] == skipped[1]
    assert 0 < sum(skipped[0]) < 14
    finite = ~np.array(skipped[0])
    assert norms[1][finite] == pytest.approx(norms[0][finite], rel=0.02)


def test_the_mean_of_weights_from_a_step_on() -> None:
    """Compare with the mean of the weights that the steps left."""
    weights: list[dict[str, Tensor]] = []
    evaluated: list[Tensor] = []
    optimizer = Optimizer(name="sgd", lr=LR, momentum=0.0, swa=3, swa_every=2)
    spec = Spec(steps=7, batch=BATCH, seed=3, precision="fp64", evaluate_every=7, optimizer=optimizer)
    task = models.Images()
    metrics = type(task).metrics

    def observe(model: nn.Module, what: str, step: int) -> None:
        if what == "weights":
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
            models_seen[:] = [model]

    models_seen: list[nn.Module] = []

    def watch(output: Tensor, batch: Any) -> Any:
        evaluated[:] = [p.detach().clone() for p in models_seen[0].parameters()]
        return metrics(task, output, batch)

    object.__setattr__(task, "metrics", watch)
    list(train(spec, task=task, observe=observe))
    for name, found in zip(weights[0], evaluated, strict=True):
        mean = sum(weights[at][name] for at in (2, 4, 6)) / 3  # after steps 3, 5 and 7
        assert relative_difference(found, mean) < 1e-14
        assert relative_difference(found, weights[6][name]) > 1e-6


def test_an_average_by_option_equals_that_of_the_task() -> None:
    class Averaged(models.Images):
        def after_step(self) -> Any:
            return [Ema(0.8)]

    spec = Spec(steps=6, batch=BATCH, seed=3, precision="fp64", evaluate_every=1, optimizer=Optimizer())
    found = [
        event.metrics["loss"]
        for task, optimizer in ((Averaged(), Optimizer()), (models.Images(), Optimizer(ema=0.8)))
        for event in train(spec.model_copy(update={"optimizer": optimizer}), task=task)
        if isinstance(event, events.Evaluated)
    ]
    assert found[:6] == found[6:]
    assert len(found) == 12
    with pytest.raises(SpecError, match=r"optimizer.ema requests an average"):
        read_operations(Averaged(), ResolvedPlan(), Optimizer(ema=0.8))
    with pytest.raises(SpecError, match=r"optimizer.swa requests an average"):
        read_operations(Averaged(), ResolvedPlan(), Optimizer(swa=5))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero3"),
        slow(2, "ddp"),
        slow(2, "zero1"),
        slow(2, "zero2"),
        slow(2, "tp=2"),
        slow(2, "pp=2,microbatches=2"),
        slow(4, "hsdp"),
        slow(4, "dp=2,tp=2,zero=3"),
    ],
)
@pytest.mark.parametrize("average", [{"swa": 2}, {"ema": 0.8}], ids=["swa", "ema"])
def test_averages_are_the_same_under_every_plan(average: dict[str, Any], size: int, plan: str) -> None:
    optimizer = Optimizer(name="sgd", lr=LR, momentum=0.0, **average)
    spec = Spec(steps=5, batch=BATCH, seed=3, precision="fp64", evaluate_every=1, optimizer=optimizer)
    expected = train_on_ranks(1, Mixed(), spec, "single").metrics
    found = train_on_ranks(size, Mixed(), spec, plan).metrics
    assert [entry["loss"] for entry in found] == pytest.approx(
        [entry["loss"] for entry in expected], rel=1e-10
    )


@pytest.mark.parametrize(("swa", "is_late"), [(5, False), (6, True)])
def test_a_mean_after_the_last_step_is_reported(swa: int, is_late: bool) -> None:
    spec = Spec(steps=5, batch=BATCH, optimizer=Optimizer(swa=swa))
    notes = train_on_this_rank(models.Points(), spec, "single").notes
    assert any("optimizer.swa=6 is after the last step, 5" in note for note in notes) == is_late


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema": 0.9, "swa": 3}, "optimizer.ema=0.9 and optimizer.swa=3 are two averages of the weights"),
        ({"swa_every": 3}, "optimizer.swa_every=3 requires optimizer.swa"),
        ({"no_agc": "x"}, "optimizer.no_agc='x' requires optimizer.agc"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(**options)


def test_bad_values_are_refused() -> None:
    with pytest.raises(TaskError, match="Swa: start must be an integer, at least 1, got 0"):
        Swa(0)
    with pytest.raises(SpecError, match=r"optimizer.no_agc: no trained parameter of the model"):
        list(train(request(agc=0.1, no_agc="none"), task=Mixed()))
    with pytest.raises(SpecError, match=r"optimizer.no_agc='\*' matches all \d+ trained parameters"):
        list(train(request(agc=0.1, no_agc="*"), task=Mixed()))
    with pytest.raises(PlanError, match="after_step"):
        read_operations(models.Points(), parse("local-sgd").resolve(2), Optimizer(ema=0.9))


def test_options_for_whole_trainings_are_refused_in_updates() -> None:
    class Parts(models.Points):
        def updates(self) -> Any:
            return [Update("all", params="*", optimizer=Optimizer(ema=0.9))]

    with pytest.raises(TaskError, match="Update all: ema, swa and on_nan of its optimizer apply to"):
        read_updates(Parts(), ResolvedPlan())

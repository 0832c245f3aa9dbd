"""Buffers that a model changes outside of its blocks are equal under pipelines and in one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from harness import TrainingResult, differences, ranks, train_on_ranks
from paceline import Spec, train
from paceline.errors import PlanError
from paceline.parallel.pipeline.buffers import StageBuffers
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.training.checkpoint.stored import load_weights
from paceline.training.model_facts.model_analysis import validate_plan

pytestmark = pytest.mark.processes

SPEC = Spec(steps=3, batch=8, seed=3, precision="fp64", optimizer=Optimizer(lr=1e-2))


class Tracker(nn.Module):
    """Keeps a running mean of its inputs, and returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, value: Tensor, training: bool) -> None:
        if training:
            self.mean.lerp_(value.detach().mean(0), 0.1)


class Tracked(nn.Module):
    """Changes buffers before, between and after its blocks.

    From inputs and from activations, in place and by assignment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.BatchNorm1d(5, affine=False)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(8)])
        self.tracker = Tracker()
        self.head = nn.Linear(5, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("inputs", torch.zeros(5))
        for at in range(8):
            self.register_buffer(f"between_{at}", torch.zeros(5))
        self.register_buffer("assigned", torch.zeros(5))
        self.register_buffer("gain", torch.ones(5))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("late", torch.zeros(5))
        self.register_buffer("late_steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.inputs = self.inputs.lerp(x.mean(0), 0.1)
        h = self.normed(x) - self.inputs
        for at, layer in enumerate(self.layers):
            mean = getattr(self, f"between_{at}")
            h = torch.tanh(layer(h)) - 0.1 * mean
            if self.training:
                mean.lerp_(h.detach().mean(0), 0.1)
            if at == 3:
                if self.training:
                    self.gain.lerp_(h.detach().square().mean(0), 0.1)
                h = h * self.gain  # autograd keeps it until the backward pass
            if at == 5:
                self.tracker(h, self.training)
                if self.training:
                    self.assigned = 0.9 * self.assigned + 0.1 * h.detach().square().mean(0)
                h = h * (1 + self.assigned)
        y = self.head(h) / (1 + self.steps)  # every stage knows the counter
        if self.training:
            self.last.data.lerp_(y.detach().mean(0), 0.1)
            self.late.lerp_(x.mean(0), 0.1)
            self.late_steps.add_(1)
        return y - 0.1 * self.last


class Tracking(models.Points):
    def model(self) -> nn.Module:
        return Tracked()

    def dataset(self, split: str) -> models.Pairs:
        size = models.SAMPLES if split == "train" else 11
        return models.Pairs(x=models.random_normal(size, 5), y=models.random_normal(size, 3, seed=1))


references: dict[str, TrainingResult] = {}


def differences_under(plan: str, size: int = 2, *fault: Any) -> list[str]:
    microbatches = next(word for word in plan.split(",") if word.startswith("microbatches"))
    if microbatches not in references:
        references[microbatches] = train_on_ranks(1, Tracking(), SPEC, f"single,{microbatches}")
        assert all(value.any() for value in references[microbatches].weights.values())
    return differences(train_on_ranks(size, Tracking(), SPEC, plan, *fault), references[microbatches], 1e-10)


@pytest.mark.parametrize(
    "schedule",
    [
        *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in ("gpipe", "interleaved")),
        *("1f1b", "zero-bubble", "zbv"),
    ],
)
def test_each_buffer_changes_once_per_microbatch(schedule: str) -> None:
    assert not differences_under(f"pp=2,microbatches=4,pp_schedule={schedule}")


class Keeping(nn.Module):
    """Reads a buffer in one place, and changes it in another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(8)])
        self.head = nn.Linear(5, 3)
        self.register_buffer("kept", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        first = derived = torch.zeros(())
        if self.kind in ("late", "middle", "inputs") or (self.kind == "evaluated" and not self.training):
            x = x - self.kept
        h = x
        for at, layer in enumerate(self.layers):
            h = torch.tanh(layer(h))
            if at == 0:
                first = h.detach().mean(0)
                if self.kind == "derived" and self.training:
                    self.kept.lerp_(first, 0.1)
                    derived = 2 * self.kept
            if self.kind == "middle" and at == 3 and self.training:
                self.kept.lerp_(h.detach().mean(0), 0.1)
        if self.training and self.kind in ("late", "skip", "inputs", "evaluated"):
            source = {"skip": first, "inputs": x.detach().mean(0)}.get(self.kind, h.detach().mean(0))
            self.kept.copy_(0.9 * self.kept + 0.1 * source)
        return self.head(h + derived)


class Kept(models.Points):
    kind: str = "late"

    def model(self) -> nn.Module:
        return Keeping(self.kind)


KINDS = ("late", "inputs", "evaluated", "skip", "derived", "middle")


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (
            "late",
            "pp=2,pp_schedule=zbv",
            r"into 2 at most \(not before layers.1: buffer kept is changed, and is used before and "
            r"after it\)",
        ),
        (
            "inputs",
            "pp=2,pp_schedule=zbv",
            r"into 2 at most \(not before layers.1: buffer kept is changed, and is used before and "
            r"after it\)",
        ),
        (
            "evaluated",
            "pp=2,pp_schedule=interleaved",
            r"into 2 at most \(not before layers.1: buffer kept is changed, and is used before and "
            r"after it\)",
        ),
        (
            "skip",
            "pp=2,pp_schedule=zbv",
            r"into 2 at most \(not before layers.1: buffer kept is changed by values computed earlier\)",
        ),
        (
            "derived",
            "pp=2,pp_schedule=zbv",
            r"into 2 at most \(not before layers.1: head also needs values computed earlier\)",
        ),
        (
            "middle",
            "pp=7,microbatches=7",
            r"into 6 at most \(not before layers.1: buffer kept is changed, and is used before and "
            r"after it\)",
        ),
    ],
)
def test_buffers_that_no_single_stage_could_keep_are_refused(kind: str, plan: str, message: str) -> None:
    ranks = 7 if "pp=7" in plan else 2
    with pytest.raises(PlanError, match=message + "; use pp="):
        validate_plan(SPEC.model_copy(update={"batch": 7 * 16}), parse(plan).resolve(ranks), Kept(kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_one_stage_keeps_match_one_process(kind: str) -> None:
    plan = "pp=2,microbatches=2,pp_schedule=zbv" if kind == "middle" else "pp=2,microbatches=2"
    assert not differences(
        train_on_ranks(2, Kept(kind=kind), SPEC, plan),
        train_on_ranks(1, Kept(kind=kind), SPEC, "single,microbatches=2"),
        1e-10,
    )


class Scaled(nn.Sequential):
    """A model that uses a parameter before it calls its first part."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Scaling(models.Points):
    def model(self) -> nn.Module:
        return Scaled()


def test_parameter_used_before_the_first_part_equals_one_process() -> None:
    assert not differences(
        train_on_ranks(2, Scaling(), SPEC, "pp=2,microbatches=2"),
        train_on_ranks(1, Scaling(), SPEC, "single,microbatches=2"),
        1e-10,
    )


class Counting(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(5, 5) for _ in range(4)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x)[:, :3]


class Counted(models.Points):
    def model(self) -> nn.Module:
        return Counting()


@contextmanager
def shared_by_stages() -> Iterator[None]:
    original = StageBuffers.installed
    StageBuffers.installed = lambda self, placeholders: nullcontext()  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        StageBuffers.installed = original  # type: ignore[method-assign]


def test_shared_buffer_changed_by_two_stages_is_caught() -> None:
    expected = train_on_ranks(1, Counted(), SPEC, "single,microbatches=2")
    assert expected.weights["steps"] == 6
    plan = "pp=2,microbatches=2,pp_schedule=interleaved"
    assert not differences(train_on_ranks(2, Counted(), SPEC, plan), expected, 1e-10)
    assert differences(train_on_ranks(2, Counted(), SPEC, plan, shared_by_stages), expected, 1e-10) == [
        "steps by 1"
    ]


def train_steps(plan: str, steps: int, run: Path) -> None:
    list(train(SPEC.model_copy(update={"steps": steps}), parse(plan), task=Tracking(), run=RunFolder(run)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pp=2,microbatches=2,pp_schedule=zbv", "single,microbatches=2"),
        ("single,microbatches=2", "pp=2,microbatches=2,pp_schedule=zbv"),
    ],
)
def test_checkpoints_have_the_changed_buffers(first: str, second: str, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    for path, plan, steps in ((whole, "single,microbatches=2", 4), (run, first, 2), (run, second, 4)):
        path.mkdir(exist_ok=True)
        ranks(1 if plan.startswith("single") else 2)(train_steps, plan, steps, path)
    expected, found = (load_weights(RunFolder(path).checkpoint(4)) for path in (whole, run))
    assert expected.keys() == found.keys() == Tracked().state_dict().keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)

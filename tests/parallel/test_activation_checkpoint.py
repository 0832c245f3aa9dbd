"""Recomputed blocks change their buffers once in a step, and compute the gradients of one forward pass."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from faults import replaced
from harness import differences, train_on_ranks
from paceline import Spec, Task, train
from paceline.errors import PlanError
from paceline.parallel import activation_checkpoint
from paceline.plan.plan import parse

pytestmark = pytest.mark.processes

SPEC = Spec(steps=3, batch=8, seed=3, precision="fp64")


class Layer(nn.Module):
    """Scales by buffers, in a way that the backward pass depends on, and then changes them.

    begin: the pass from which on `scale` changes; -1: never. torch 2.13 compiles a block wrongly that changes
    a tensor in place which its backward pass needs as it was (`docs/decisions.md`).
    """

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin = begin
        self.linear = nn.Linear(5, 5)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.scale.clone()) * (1 + self.last)
        if self.training:
            if self.begin == 0:
                self.scale.data.mul_(0.9).add_(y.detach().square().mean(0))  # unseen by autograd
            elif self.begin > 0 and self.passes >= self.begin:
                self.scale.mul_(0.9)
            self.last = 0.1 * y.detach().mean(0)
            self.passes += 1
        return x + y


class Scaling(models.Points):
    begin: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(*(Layer(self.begin) for _ in range(3))), nn.Linear(5, 3))

    def dataset(self, split: str) -> Any:
        size = models.SAMPLES if split == "train" else 11
        return models.Pairs(x=models.random_normal(size, 5), y=models.random_normal(size, 3, seed=1))


@contextlib.contextmanager
def changed_twice() -> Any:
    with replaced(activation_checkpoint, "_UnitBuffers", lambda original: lambda module, plan: None):
        yield


CASES: list[tuple[Task, int, str]] = [
    (Scaling(), 1, "single,recompute=full"),
    (Scaling(), 1, "single,recompute=selective,microbatches=2"),
    (Scaling(), 2, "pp=2,microbatches=4,pp_schedule=zbv,recompute=full"),
    (models.NormedImages(), 2, "zero3,recompute=full"),
]


@pytest.mark.parametrize(("task", "size", "plan"), CASES)
def test_recomputation_changes_buffers_once(task: Task, size: int, plan: str) -> None:
    microbatches = [word for word in plan.split(",") if word.startswith("microbatches")]
    expected = train_on_ranks(1, task, SPEC, ",".join(["single", *microbatches]))
    assert not differences(train_on_ranks(size, task, SPEC, plan), expected, 1e-10)


@pytest.mark.parametrize("task", [Scaling(), models.NormedImages()])
def test_buffers_that_change_twice_differ(task: Task) -> None:
    expected = train_on_ranks(1, task, SPEC, "single")
    assert differences(train_on_ranks(1, task, SPEC, "single,recompute=full", changed_twice), expected, 1e-3)


def test_a_buffer_that_changes_later_is_refused() -> None:
    events = train(SPEC, parse("single,recompute=full"), task=Scaling(begin=2), device="cpu")
    with pytest.raises(
        PlanError, match="a recomputed Layer changes its buffer 'scale', which it did not in its"
    ):
        list(events)


COMPILED: list[tuple[Task, int, str]] = [
    (Scaling(begin=-1), 1, "single,recompute=full"),
    (models.NormedImages(), 2, "ddp,recompute=full"),
    (models.NormedImages(), 2, "zero3,recompute=full"),
]


@pytest.mark.slow  # the C++ compiler is slow
@pytest.mark.parametrize(("task", "size", "plan"), COMPILED)
def test_compiled_blocks_change_buffers_once(task: Task, size: int, plan: str) -> None:
    expected = train_on_ranks(1, task, SPEC, "single")  # eager
    compiled = SPEC.model_copy(update={"compile": True})
    assert not differences(train_on_ranks(size, task, compiled, plan), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("task", [Scaling(begin=-1), models.NormedImages()])
def test_compiled_blocks_that_save_products_are_refused(task: Task) -> None:
    spec = SPEC.model_copy(update={"compile": True})
    events = train(spec, parse("single,recompute=selective"), task=task, device="cpu")
    with pytest.raises(PlanError, match="twice in compiled blocks; use recompute=full, or leave --compile"):
        list(events)

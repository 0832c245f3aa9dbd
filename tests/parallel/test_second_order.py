"""Tests of tasks that differentiate in their forward pass: gradients of gradients equal one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import models
import sequences
from harness import differences, ranks, train_on_ranks, train_on_this_rank
from paceline import Spec, Task
from paceline.errors import PlanError
from paceline.parallel.tensor.linear import _EnterSplitLinear
from paceline.spec import Optimizer

pytestmark = pytest.mark.processes

SPEC = Spec(batch=8, steps=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, weight_decay=0.1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def build_net(kind: str) -> nn.Module:
    if kind == "layers":
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    if kind == "norms":
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(nn.Linear(4, 8), Residual(), Residual(), nn.LayerNorm(8), nn.Linear(8, 3))


class WithSlope(nn.Module):
    """Returns the values of a network and their slope."""

    def __init__(self, kind: str):
        super().__init__()
        self.net = build_net(kind)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self.net(x)
            [slope] = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        return value, slope


class Slopes(Task):
    kind: str = "layers"

    def model(self) -> nn.Module:
        return WithSlope(self.kind)

    def dataset(self, split: str) -> Any:
        shape = (24, 6, 4) if self.kind == "sequences" else (24, 4)
        return models.Pairs(x=models.random_normal(*shape)) if split == "train" else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        value, slope = output
        return (value.sum(-1) - 1).square() + slope.square().sum(-1)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("layers", "tp=2"), ("layers", "zero3"), ("sequences", "tp=2"), ("norms", "ddp"), ("norms", "zero2")],
)
def test_gradients_of_gradients_equal_those_of_one_process(kind: str, plan: str) -> None:
    found = train_on_ranks(2, Slopes(kind=kind), SPEC, plan)
    assert not differences(found, train_on_ranks(1, Slopes(kind=kind), SPEC, "single"), 1e-12)


def train_with_first_order_only(task: Task, plan: str) -> Any:
    """Train on this rank with a sum over the ranks that autograd does not see."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            whole = grad.clone()
            torch.distributed.all_reduce(whole, group=ctx.group)
        return whole, None

    original, _EnterSplitLinear.backward = _EnterSplitLinear.backward, staticmethod(backward)  # type: ignore[method-assign]
    try:
        return train_on_this_rank(task, SPEC, plan)
    finally:
        _EnterSplitLinear.backward = original  # type: ignore[method-assign]


def test_a_sum_without_a_derivative_is_detected() -> None:
    found = ranks(2)(train_with_first_order_only, Slopes(), "tp=2")[0]
    assert differences(found, train_on_ranks(1, Slopes(), SPEC, "single"), 1e-6)


class Steep(nn.Module):
    """Returns the logits of a GPT, and their slope over its embedding."""

    def __init__(self, gpt: nn.Module):
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel that has second derivatives.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            logits = self.gpt(tokens)
            [slope] = torch.autograd.grad(logits.square().mean(), self.gpt.tokens.weight, create_graph=True)
        return logits, slope


class SteepText(sequences.Variant):
    kind: str = "nothing"

    def model(self) -> nn.Module:
        return Steep(super().model())

    def loss(self, output: Any, batch: Any) -> Tensor:
        logits, slope = output
        return super().loss(logits, batch) + slope.square().sum()


def return_refusal(task: Task, plan: str) -> str:
    with pytest.raises(PlanError) as raised:
        train_on_this_rank(task, SPEC, plan)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["nothing", "relative bias"], ids=["ring", "gathered keys"])
def test_cp_refuses_to_differentiate_gradients(kind: str) -> None:
    task = SteepText(kind=kind)
    assert train_on_ranks(1, task, SPEC, "single").losses[-1] > 0
    for error in ranks(2)(return_refusal, task, "cp=2"):
        assert "the task differentiates gradients (create_graph=True)" in error
        assert error.endswith("use a plan without cp")

"""Optimizers of the user's code are tried, and refused under plans that would change their update."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from harness import differences_from_single, ranks, train_on_this_rank
from own_optimizers import Large, Late
from paceline import Spec
from paceline.errors import PlanError
from paceline.plan.plan import ResolvedPlan, parse
from paceline.torch_compat import make_fake_mode
from paceline.training.optimization.optimizer_trial import Independence, check_independence, try_optimizer
from paceline.training.optimizers.lamb import Lamb


class Signs(torch.optim.Optimizer):
    """Element by element, with an attribute of its own and a state."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})
        self.factor = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].get("momentum", 0) * self.factor + parameter.grad
                    self.state[parameter]["momentum"] = momentum
                    parameter -= group["lr"] * momentum.sign()


class ByTensor(Signs):
    """By the norm of each tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1e-6
        super().step()


class ByRow(Signs):
    """By the mean of each row, which shards of rows have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.grad -= parameter.grad.mean(1, keepdim=True)
        super().step()


class Clipped(Signs):
    """By the norm of all tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


class Noisy(Signs):
    """With random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += torch.randn_like(parameter) * 1e-3


class Stubborn(Signs):
    """It works only on the shapes of the model."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no")


def make_params() -> list[nn.Parameter]:
    shapes = [(9, 7), (7,), (), (1, 3, 2, 2), (0,)]
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.SGD, Independence.ELEMENTS),
        (torch.optim.AdamW, Independence.ELEMENTS),
        (torch.optim.Rprop, Independence.ELEMENTS),
        (Signs, Independence.ELEMENTS),
        (ByRow, Independence.ELEMENTS),
        (torch.optim.Adafactor, Independence.TENSORS),
        (Lamb, Independence.TENSORS),
        (ByTensor, Independence.TENSORS),
        (Clipped, Independence.NOTHING),
        (Noisy, Independence.RANDOM),
        (Stubborn, Independence.NOTHING),
    ],
)
def test_what_an_optimizer_updates_independently(kind: Any, expected: Independence) -> None:
    params = make_params()
    before = torch.get_rng_state()
    optimizer = kind(params, lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user is called"))
    assert try_optimizer(optimizer) is expected
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in params)
    assert not optimizer.state


def test_a_trial_in_a_dry_run_has_values() -> None:
    with make_fake_mode():
        params = make_params()
        assert try_optimizer(Signs(params)) is Independence.ELEMENTS
        assert try_optimizer(ByTensor(params)) is Independence.TENSORS


def test_groups_keep_their_options() -> None:
    """An optimizer that acts on one group only is tried with this group."""

    class SecondGroup(ByTensor):
        def step(self, closure: Any = None) -> None:
            groups, self.param_groups = self.param_groups, self.param_groups[1:]
            super().step()
            self.param_groups = groups

    first, *others = make_params()
    optimizer = SecondGroup([{"params": [first]}, {"params": others}])
    assert try_optimizer(optimizer) is Independence.TENSORS


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (ByTensor, "zero3", "trial steps on small shards showed that ByTensor does not update each element "),
        (ByTensor, "zero3", "use ddp, zero1 or pp, or a built-in --optimizer"),
        (Clipped, "zero2", "use ddp, or a built-in --optimizer"),
        (Clipped, "zero1", "Clipped does not update each tensor independently; use ddp, or a built-in"),
        (Clipped, "pp=2", "plan .*pp=2.* divides the parameters over ranks"),
        (ByTensor, "zero1", None),
        (ByTensor, "pp=2", None),
        (Clipped, "ddp", None),
        (Signs, "zero3", None),
        (Lamb, "zero3", None),
    ],
)
def test_refused_plans(kind: Any, plan: str, message: str | None) -> None:
    resolved: ResolvedPlan = parse(plan).resolve(2)
    optimizer = kind(make_params(), lr=0.01)
    if message is None:
        check_independence(optimizer, resolved)
        return
    with pytest.raises(PlanError, match=message):
        check_independence(optimizer, resolved)


class OwnSigns(models.Points):
    """A task with an element-wise optimizer of its own."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Signs([parameter for _, parameter in params])


class OwnClipped(models.Points):
    """A task whose optimizer reads all gradients."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Clipped([parameter for _, parameter in params])


SPEC = Spec(steps=4, batch=8, seed=3, precision="fp64")


@pytest.mark.processes
def test_an_elementwise_optimizer_of_the_task_works_on_shards() -> None:
    assert differences_from_single(2, "zero3", OwnSigns(), SPEC) == []


def refusal() -> str:
    try:
        train_on_this_rank(OwnClipped(), SPEC, "zero1")
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_an_optimizer_that_reads_all_gradients_is_refused_on_ranks() -> None:
    assert all("Clipped does not update each tensor" in text for text in ranks(2)(refusal))
    assert differences_from_single(2, "ddp", OwnClipped(), SPEC) == []


@pytest.mark.parametrize("kind", [Late, Large])
def test_a_trial_finds_what_small_tensors_and_first_steps_do_not_show(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(200, 300)), nn.Parameter(torch.ones(300))]
    assert try_optimizer(kind(params)) is Independence.TENSORS


def test_a_trial_finds_random_rounding_of_bf16() -> None:
    class Rounding(Signs):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    if grad.dtype == torch.bfloat16:
                        grad = grad + torch.rand_like(grad) * 0.01
                    parameter -= group["lr"] * grad

    params = [nn.Parameter(torch.ones(9, 7, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    assert try_optimizer(Rounding(params)) is Independence.RANDOM
    assert try_optimizer(Rounding(params[:1])) is Independence.ELEMENTS


def test_a_trial_finds_small_differences() -> None:
    """Negative control: an update that differs in the seventh digit is no longer that of elements."""

    class Slightly(Signs):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    grad: Tensor = parameter.grad
                    parameter -= group["lr"] * (grad + 1e-6 * grad.mean())

    assert try_optimizer(Slightly(make_params())) is Independence.TENSORS

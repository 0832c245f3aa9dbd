"""OptimizerStep computes the same bits as torch's `optimizer.step()`, and leaves out no part of a step."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.training.optimization.optimizer_step import OptimizerStep

STEPS = 5
Trained = tuple[nn.Module, Callable[[], object]]  # a model, and a function that updates it
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MADE: dict[str, Make] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "two groups": lambda params: torch.optim.AdamW(
        [
            {"params": params[:2], "weight_decay": 0.3},
            {"params": params[2:], "lr": 1e-3, "betas": (0.5, 0.7), "eps": 1e-3},
        ],
        fused=True,
    ),
    "AdamW, not fused": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, fused=True),
    "maximize": lambda params: torch.optim.AdamW(params, lr=1e-2, maximize=True, fused=True),
    "lr is a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "scheduler": lambda params: scheduled(torch.optim.AdamW(params, lr=1e-2, fused=True)),
}


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return optimizer


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 130), nn.ReLU(), nn.Linear(130, 5), nn.Linear(5, 2))


def fill_gradients(made: nn.Module, step: int, without: int | None = None) -> None:
    drawn = torch.Generator().manual_seed(step)
    for at, parameter in enumerate(made.parameters()):
        parameter.grad = (
            None if at == without else torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
        )


def update(mine: Trained, theirs: Trained, at: int, without: int | None = None) -> None:
    """Make a step with both on the same gradients."""
    for each, call in (mine, theirs):
        fill_gradients(each, at, without)
        with torch.no_grad():
            call()


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = []
    for mine, theirs in zip(params_of(actual), params_of(expected), strict=True):
        pairs.append((mine, theirs))
        assert actual.state[mine].keys() == expected.state[theirs].keys()
        pairs += [
            (value, expected.state[theirs][key])
            for key, value in actual.state[mine].items()
            if isinstance(value, Tensor)
        ]
    return all(torch.equal(a, b) for a, b in pairs)


def pair(
    make: Make, of: Callable[[], nn.Module] = model
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    mine, theirs = of(), of()
    return mine, make(list(mine.parameters())), theirs, make(list(theirs.parameters()))


@pytest.mark.parametrize("name", MADE)
def test_update_is_bitwise_torchs(name: str) -> None:
    mine, optimizer, theirs, expected = pair(MADE[name])
    step = OptimizerStep(optimizer)
    for at in range(STEPS):
        update((mine, step), (theirs, expected.step), at)
        for group in (*optimizer.param_groups, *expected.param_groups):  # as a schedule sets it
            if not isinstance(group["lr"], Tensor):
                group["lr"] *= 0.7
    assert same(optimizer, expected)


def test_float64_and_half_precision() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        mine, optimizer, theirs, expected = pair(MADE["fused AdamW"], lambda dtype=dtype: model().to(dtype))  # type: ignore[misc]
        step = OptimizerStep(optimizer)
        for at in range(STEPS):
            update((mine, step), (theirs, expected.step), at)
        assert same(optimizer, expected)


def test_parameter_without_gradient_is_not_updated() -> None:
    mine, optimizer, theirs, expected = pair(MADE["two groups"])
    step = OptimizerStep(optimizer)
    for at, without in enumerate((None, 3, None, 0, None)):
        update((mine, step), (theirs, expected.step), at, without)
    assert same(optimizer, expected)


def test_parameter_with_a_late_first_gradient() -> None:
    mine, optimizer, theirs, expected = pair(MADE["fused AdamW"])
    step = OptimizerStep(optimizer)
    for at, without in enumerate((1, 1, None, None, None)):
        update((mine, step), (theirs, expected.step), at, without)
    assert same(optimizer, expected)


def test_loaded_state_is_used() -> None:
    mine, optimizer, theirs, expected = pair(MADE["fused AdamW"])
    step = OptimizerStep(optimizer)
    for at in range(STEPS):
        update((mine, step), (theirs, expected.step), at)
        if at == 2:
            for changed in (optimizer, expected):
                state = copy.deepcopy(changed.state_dict())
                for values in state["state"].values():
                    values["exp_avg"].mul_(-3)
                changed.load_state_dict(state)
    assert same(optimizer, expected)


@pytest.mark.parametrize("to_a_group", [True, False])
def test_added_parameter_is_trained(to_a_group: bool) -> None:
    mine, optimizer, theirs, expected = pair(
        lambda params: torch.optim.AdamW(params[:3], lr=1e-2, fused=True)
    )
    step = OptimizerStep(optimizer)
    for at in range(STEPS):
        if at == 3:
            for trained, changed in ((mine, optimizer), (theirs, expected)):
                last = list(trained.parameters())[3]
                if to_a_group:
                    changed.param_groups[0]["params"].append(last)
                else:
                    changed.add_param_group({"params": [last]})
        update((mine, step), (theirs, expected.step), at)
    assert len(params_of(optimizer)) == 4
    assert same(optimizer, expected)


def test_hooks_are_called_in_every_step() -> None:
    """Hooks that are registered after the first steps are called too."""
    mine, optimizer, _, _ = pair(MADE["fused AdamW"])
    step, called = OptimizerStep(optimizer), list[str]()

    def update(at: int) -> None:
        fill_gradients(mine, at)
        with torch.no_grad():
            step()

    update(0)
    update(1)
    assert not called
    handles = [
        optimizer.register_step_pre_hook(lambda *of: called.append("before")),
        optimizer.register_step_post_hook(lambda *of: called.append("after")),
        register_optimizer_step_post_hook(lambda *of: called.append("after any")),
    ]
    update(2)
    assert called == ["before", "after", "after any"]
    for handle in handles:
        handle.remove()
    update(3)
    assert len(called) == 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_fused_adamw_does_not_call_torchs_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of these tests would compare torch with itself."""
    mine, optimizer, _, _ = pair(MADE["fused AdamW"])
    step, called = OptimizerStep(optimizer), list[int]()
    original = torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW) -> None:
        called.append(1)
        original(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    for at in range(STEPS):
        fill_gradients(mine, at)
        with torch.no_grad():
            step()
    assert len(called) == 1  # the first, in which torch makes the state

"""Options of single parameters equal those of groups that torch gets by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import models
from harness import differences_from_single, relative_difference
from paceline import Spec
from paceline.errors import SpecError
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer, ParamGroup
from paceline.training.optimization.optimizer import OptimizerReport, make_optimizer
from paceline.training.optimizers.param_groups import assign_options


def options_of(model: nn.Module, **options: Any) -> dict[str, dict[str, Any]]:
    names = [name for name, _ in model.named_parameters()]
    return assign_options(Optimizer(**options), model, names)


def test_keywords_and_patterns() -> None:
    model = models.Gpt()
    found = options_of(model, weight_decay=0.1, no_decay="norm, bias,embedding")
    norms = {"norm.weight", "norm.bias", *(f"blocks.{at}.norm.{kind}" for at in range(3) for kind in KINDS)}
    biases = {f"blocks.{at}.mlp.{layer}.bias" for at in range(3) for layer in (0, 2)}
    assert found == {name: {"weight_decay": 0.0} for name in {"tokens.weight"} | norms | biases}
    found = options_of(
        model,
        name="lamb",
        lr=0.5,
        weight_decay=0.1,
        no_trust="blocks.0.*",
        groups={"blocks.?.mlp.*": ParamGroup(lr_scale=0.1), "blocks.*": ParamGroup(weight_decay=0.0, lr=1.0)},
    )
    assert found["blocks.0.mlp.0.weight"] == {"lr": 0.05, "trust": False}
    assert found["blocks.1.mlp.0.weight"] == {"lr": 0.05}
    assert found["blocks.1.qkv.weight"] == {"lr": 1.0, "weight_decay": 0.0}
    assert "tokens.weight" not in found


def test_a_keyword_beside_others_may_match_nothing() -> None:
    found = options_of(models.Points().model(), weight_decay=0.1, no_decay="norm,bias,embedding")
    assert found
    assert set(found) == set(options_of(models.Points().model(), weight_decay=0.1, no_decay="bias"))


def test_an_unknown_option_of_a_group_is_refused() -> None:
    message = "a group of optimizer.groups has no option 'weight_decy'; did you mean weight_decay"
    with pytest.raises(ValueError, match=message):
        Optimizer.model_validate({"groups": {"*": {"weight_decy": 0.1}}})


KINDS = ("weight", "bias")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"no_decay": "none.*"},
            r"optimizer.no_decay: no trained parameter of the model matches 'none",
        ),
        ({"no_decay": "*"}, r"optimizer.no_decay='\*' matches all 6 trained parameters; leave some out"),
        ({"no_decay": "norm"}, "optimizer.no_decay: no trained parameter of the model matches 'norm'"),
        ({"no_decay": "bias,none.*"}, "optimizer.no_decay: no trained parameter of the model matches 'none"),
        ({"groups": {"4.*": ParamGroup(lr=1.0), "x": ParamGroup(lr=1.0)}}, "optimizer.groups: no trained"),
        (
            {"groups": {"*": ParamGroup(lr=1.0), "4.*": ParamGroup(lr=2.0)}},
            "optimizer.groups: earlier patterns match all parameters of '4",
        ),
    ],
)
def test_patterns_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        options_of(models.Points().model(), weight_decay=0.1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_decay": "bias"}, "optimizer.no_decay='bias' has no effect without weight decay"),
        ({"no_trust": "bias"}, "adamw has no trust ratio, got optimizer.no_trust or a group with trust"),
        ({"groups": {"a": {}}}, "a group of optimizer.groups is empty"),
        (
            {"groups": {"a": {"lr": 1.0, "lr_scale": 2.0}}},
            "a group of optimizer.groups has lr=1 and lr_scale",
        ),
        ({"name": "rprop", "groups": {"a": {"weight_decay": 1.0}}}, "rprop has no weight decay, got a group"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(**options)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_groups_equal_those_by_hand(name: str) -> None:
    spec = Optimizer(
        name=name,
        lr=0.01,
        weight_decay=0.1,
        no_decay="bias",
        groups={"4.*": ParamGroup(lr_scale=3.0), "0.weight": ParamGroup(weight_decay=0.5)},
    )
    model = models.Points().model().double()
    twin = copy.deepcopy(model)
    report = OptimizerReport(spec)
    ours = make_optimizer(models.Points(), spec, ResolvedPlan(), model, report)
    assert "the parameter groups have different learning rates" in report.notes[0]
    params = dict(twin.named_parameters())
    plain = make_optimizer(models.Points(), Optimizer(name=name), ResolvedPlan(), twin)
    theirs = type(plain)(
        [
            {"params": [params["2.weight"]]},
            {"params": [params["0.weight"]], "weight_decay": 0.5},
            {"params": [params["4.weight"]], "lr": 0.03},
            {"params": [params["0.bias"], params["2.bias"]], "weight_decay": 0.0},
            {"params": [params["4.bias"]], "lr": 0.03, "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.1,
        **({"momentum": 0.9} if name == "sgd" else {}),
    )
    for seed in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            net(models.random_normal(4, 5, seed=seed).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_difference(parameter.detach(), expected.detach()) < 1e-13


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero1"),
        (2, "zero3"),
        (2, "pp=2,microbatches=2"),
        *(
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in ((2, "ddp"), (2, "zero2"), (2, "tp=2"), (4, "hsdp"), (4, "dp=2,tp=2,zero=3"))
        ),
    ],
)
def test_groups_are_the_same_under_every_plan(size: int, plan: str) -> None:
    optimizer = Optimizer(
        name="lamb",
        lr=0.01,
        weight_decay=0.1,
        no_decay="bias",
        no_trust="0.*",
        groups={"2.*": ParamGroup(lr_scale=3.0)},
    )
    spec = Spec(steps=5, batch=8, seed=3, precision="fp64", optimizer=optimizer)
    task = models.Tempered() if "tp" in plan else models.Points()  # whose sizes tp divides
    assert differences_from_single(size, plan, task, spec) == []


def test_trust_of_a_group() -> None:
    """Without its trust ratio, LAMB is Adam with decoupled weight decay."""
    model = nn.Linear(5, 3).double()
    twin = copy.deepcopy(model)
    spec = Optimizer(name="lamb", lr=0.01, weight_decay=0.1, eps=1e-8, no_trust="weight")
    ours = make_optimizer(models.Points(), spec, ResolvedPlan(), model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    for seed in range(3):
        for net, optimizer in ((model, ours), (twin, theirs)):
            for parameter in net.parameters():
                parameter.grad = models.random_normal(*parameter.shape, seed=seed).double()
            optimizer.step()
    assert relative_difference(model.weight.detach(), twin.weight.detach()) < 1e-12
    assert relative_difference(model.bias.detach(), twin.bias.detach()) > 1e-3

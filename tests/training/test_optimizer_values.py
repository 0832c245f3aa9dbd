"""Optimizers of user code train and continue under every plan as in one process, or are refused by name."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from faults import replaced
from harness import ranks, relative_difference, to_whole_array, train_on_this_rank
from own_optimizers import OPTIMIZERS, OwnOptimizer
from paceline import Spec, train
from paceline.distributed.dtensor import is_materialized
from paceline.errors import CheckpointError, PlanError
from paceline.run import RunFolder
from paceline.training.optimization import optimizer as optimizer_module
from paceline.training.optimization.optimizer_values import (
    allocate_values,
    collect_values,
    remember_start,
    restore_values,
)

STEPS, RESUMED = 8, 4
SPEC = Spec(steps=STEPS, batch=8, seed=3, precision="fp64")
EXACT = ["numbers", "counting", "options", "listing", "lookahead"]
Weights = dict[str, np.ndarray]


class TensorOf:
    """The metadata of a stored tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.size, self.properties = tensor.size(), tensor


def build(kind: str) -> tuple[nn.ParameterList, Any]:
    params = nn.ParameterList([torch.linspace(-1, 1, 6).view(2, 3), torch.ones(())])
    optimizer = OPTIMIZERS[kind](list(params))
    remember_start(optimizer)
    return params, optimizer


def take_steps(params: nn.ParameterList, optimizer: Any, steps: range) -> None:
    for step in steps:
        for parameter in params:
            parameter.grad = (parameter.detach() + step).cos()
        optimizer.step()


def save(params: nn.ParameterList, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in params.named_parameters()}
    return {name: value.clone() for name, value in collect_values(optimizer, names).items()}


def load(stored: dict[str, torch.Tensor], params: nn.ParameterList, optimizer: Any) -> None:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in params.named_parameters()}
    metadata = {name: TensorOf(tensor) for name, tensor in stored.items()}
    wanted = allocate_values(metadata, optimizer, names)
    for name, tensor in wanted.items():
        tensor.copy_(stored[name])
    restore_values(optimizer, names, wanted)


@pytest.mark.parametrize("kind", [*EXACT, "stacking", "generating"])
def test_an_optimizer_continues_from_its_values(kind: str) -> None:
    params, optimizer = build(kind)
    take_steps(params, optimizer, range(5))
    stored = save(params, optimizer)
    others, twin = build(kind)
    for parameter, other in zip(params, others, strict=True):
        other.data.copy_(parameter.data)
    load(stored, others, twin)
    for net, of_net in ((params, optimizer), (others, twin)):
        take_steps(net, of_net, range(5, 10))
    assert all(map(torch.equal, params, others))
    fresh, without = build(kind)
    for parameter, other in zip(others, fresh, strict=True):
        other.data.copy_(parameter.data)
    for net, of_net in ((params, optimizer), (fresh, without)):
        take_steps(net, of_net, range(10, 12))
    assert kind == "options" or not all(map(torch.equal, params, fresh))


def test_names_of_values() -> None:
    params, optimizer = build("counting")
    take_steps(params, optimizer, range(2))
    found = save(params, optimizer)
    assert {name: value.item() for name, value in found.items()} == {
        "0/group:step:int": 2,
        "1/group:step:int": 2,
        "/0.count:int": 2,
        "/0.k": 2,
    }
    params, optimizer = build("lookahead")
    take_steps(params, optimizer, range(1))
    keys = {"slow", "base.step", "base.exp_avg", "base.exp_avg_sq"}
    assert save(params, optimizer).keys() == {f"{at}/{key}" for at in (0, 1) for key in keys} | {
        "/0.count:int"
    }


def test_a_value_that_checkpoints_cannot_hold_is_named() -> None:
    params, optimizer = build("queueing")
    take_steps(params, optimizer, range(2))
    with pytest.raises(CheckpointError, match="checkpoints cannot hold 'queue' of Queueing for 0, which is"):
        load(save(params, optimizer), *build("queueing"))


def test_a_tensor_of_another_data_structure_is_not_lost() -> None:
    """A tensor in an attribute that steps change may be different on each rank."""
    params, optimizer = build("numbers")
    optimizer.sums, optimizer.constant = torch.zeros(3), torch.ones(3)
    remember_start(optimizer)
    take_steps(params, optimizer, range(1))
    optimizer.sums += 1
    with pytest.raises(CheckpointError, match=r"cannot hold '0\.sums' of Numbers"):
        load(save(params, optimizer), *build("numbers"))


def train_kinds(plan: str, kinds: list[str], fault: Any = None) -> dict[str, Weights | str]:
    found: dict[str, Weights | str] = {}
    for kind in kinds:
        try:
            arguments = [fault] if fault is not None else []
            found[kind] = train_on_this_rank(OwnOptimizer(kind=kind), SPEC, plan, *arguments).weights
        except PlanError as error:
            found[kind] = str(error)
    return found


@cache
def train_one_process(kinds: tuple[str, ...]) -> dict[str, Any]:
    return ranks(1)(train_kinds, "single", list(kinds))[0]


def differences(size: int, plan: str, kinds: list[str], fault: Any = None) -> dict[str, float]:
    """Return the optimizers whose weights differ from those of one process."""
    expected = train_one_process(tuple(kinds))
    weights: dict[str, Weights] = {kind: {} for kind in kinds}
    for on_rank in ranks(size)(train_kinds, plan, kinds, fault):
        for kind in kinds:
            weights[kind] |= on_rank[kind]
    return find_different(weights, expected)


def find_different(weights: dict[str, Weights], expected: dict[str, Weights]) -> dict[str, float]:
    errors = {
        kind: max(relative_difference(weights[kind][name], value) for name, value in tensors.items())
        for kind, tensors in expected.items()
    }
    return {kind: error for kind, error in errors.items() if not error <= 1e-10}


def rebuilt_by_torch() -> Any:
    """Let torch make another optimizer of the same class from the options of the groups."""
    return replaced(optimizer_module, "_can_be_rebuilt", lambda original: lambda optimizer: True)


@pytest.mark.processes
def test_zero1_keeps_options_outside_of_groups() -> None:
    assert differences(2, "zero1", ["counting", "options", "lookahead"]) == {}
    assert differences(2, "zero1", ["counting"], rebuilt_by_torch).keys() == {"counting"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("size", "plan"), [(2, "zero3"), (4, "hsdp"), (2, "pp=2,microbatches=2")])
def test_other_plans(size: int, plan: str) -> None:
    assert differences(size, plan, [*EXACT, "stacking"]) == {}


@pytest.mark.processes
def test_random_numbers_are_those_of_one_process_under_ddp() -> None:
    assert differences(2, "ddp", ["noisy", "generating"]) == {}
    found = ranks(2)(train_kinds, "zero1", ["noisy"])
    assert all("trial steps showed that Noisy draws random numbers" in on_rank["noisy"] for on_rank in found)


def resume(plan: str, kinds: list[str], folder: str, steps: int, begin: int) -> dict[str, Weights]:
    """Train to a step with a checkpoint at the end, from that of step `begin`, if it is not 0."""
    found = {}
    for kind in kinds:
        run = RunFolder(Path(folder) / kind)
        run.path.mkdir(exist_ok=True, parents=True)
        observed: list[nn.Module] = []
        spec = SPEC.model_copy(update={"steps": steps})
        task = OwnOptimizer(kind=kind)
        events = list(
            train(spec, plan, task=task, run=run, observe=lambda model, *_, to=observed: to.append(model))
        )
        assert events[0].step == begin
        found[kind] = {
            name: to_whole_array(tensor)
            for name, tensor in observed[-1].named_parameters()
            if is_materialized(tensor)
        }
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "zero1"), (1, "single")),
        slow((1, "single"), (2, "zero3")),
        slow((2, "zero3"), (2, "pp=2,microbatches=2")),
        slow((2, "pp=2,microbatches=2"), (2, "zero1")),
    ],
    ids=["zero1-single", "single-zero3", "zero3-pp", "pp-zero1"],
)
def test_resumed_under_another_plan(first: tuple[int, str], second: tuple[int, str], tmp_path: Path) -> None:
    ranks(first[0])(resume, first[1], EXACT, str(tmp_path), RESUMED, 0)
    weights: dict[str, Weights] = {kind: {} for kind in EXACT}
    for rank in ranks(second[0])(resume, second[1], EXACT, str(tmp_path), STEPS, RESUMED):
        for kind in EXACT:
            weights[kind] |= rank[kind]
    expected = train_one_process(tuple(EXACT))
    trained = {kind: {name: expected[kind][name] for name in weights[kind]} for kind in EXACT}
    assert find_different(weights, trained) == {}


@pytest.mark.processes
@pytest.mark.slow
def test_a_state_of_another_shape_is_refused_on_shards(tmp_path: Path) -> None:
    ranks(1)(resume, "single", ["stacking"], str(tmp_path), RESUMED, 0)
    with pytest.raises(AssertionError, match=r"moments of .* has shape \(2, .*resume with ddp or zero1"):
        ranks(2)(resume, "zero3", ["stacking"], str(tmp_path), STEPS, RESUMED)

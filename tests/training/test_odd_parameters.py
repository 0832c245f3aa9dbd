"""Optimizers on parameters that need care: tied, frozen, empty, of one element, complex, without gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import ranks, relative_difference, train_on_this_rank
from models import SAMPLES, Rows, random_integers, random_normal
from paceline import Spec, Task
from paceline.errors import PlanError, SpecError
from paceline.optimizer_options import OPTIMIZERS
from paceline.plan.plan import ResolvedPlan, parse
from paceline.spec import Optimizer
from paceline.training.model_facts.model_analysis import validate_plan
from paceline.training.optimization.optimizer import make_optimizer

OWN = ("lion", "lars", "lamb", "novograd", "adafactor", "muon", "rprop")
GROUPS = {"conv.*": {"lr": 0.002}, "hidden.weight": {"lr_scale": 3.0, "weight_decay": 0.0}}


class Net(nn.Module):
    """A tied embedding, a convolution, a frozen layer, and parameters of no or one element, or complex."""

    def __init__(self, has_complex: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.conv, self.hidden = nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.one, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 6))
        self.spectrum = nn.Parameter(torch.ones(6, dtype=torch.complex64)) if has_complex else None

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens)
        x_BTC = x_BTC + self.conv(x_BTC.transpose(1, 2)).transpose(1, 2).tanh()
        x_BTC = x_BTC + self.frozen(x_BTC).tanh() * self.one
        x_BTC = x_BTC + self.hidden(x_BTC).tanh() + self.empty.sum(0)
        if self.spectrum is not None:
            x_BTC = x_BTC * self.spectrum.real + self.spectrum.imag
        return self.head(x_BTC)


class Phase(nn.Module):
    """A model beside a complex and a real scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(has_complex=False)
        self.phase, self.gain = nn.Parameter(torch.tensor(0.7 + 0.3j)), nn.Parameter(torch.tensor(1.1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.phase.real * self.gain + self.phase.imag * torch.arange(11)


class Odd(Task):
    has_complex: bool = False
    has_phase: bool = False

    def model(self) -> nn.Module:
        return Phase() if self.has_phase else Net(self.has_complex)

    def dataset(self, split: str) -> Rows | None:
        return Rows(tokens=random_integers(11, SAMPLES, 9)) if split == "train" else None

    def inputs(self, batch: Any) -> Tensor:
        return batch["tokens"][:, :-1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")


def train_each(plan: str, names: list[str], has_complex: bool = False) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        options = {"ns_precision": "full"} if name == "muon" else {}
        groups = GROUPS if name != "rprop" else {"conv.*": {"lr": 0.002}}  # has no weight decay
        spec = Spec(
            steps=5,
            batch=12,
            seed=3,
            precision="fp64",
            optimizer=Optimizer(name=name, lr=0.01, groups=groups, **options),
        )
        found[name] = train_on_this_rank(Odd(has_complex=has_complex), spec, plan).weights
    return found


def differences(size: int, plan: str, names: list[str], has_complex: bool = False) -> dict[str, float]:
    """Return the optimizers whose weights differ from those of one process, with the difference."""
    [expected] = ranks(1)(train_each, "single", names, has_complex)
    weights: dict[str, dict[str, Any]] = {name: {} for name in names}
    for on_rank in ranks(size)(train_each, plan, names, has_complex):
        for name in names:
            weights[name] |= on_rank[name]
    errors = {
        name: max(relative_difference(weights[name][key], value) for key, value in expected[name].items())
        for name in names
    }
    return {name: error for name, error in errors.items() if not error <= 1e-10}


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero3", "tp=2"])
def test_muon_and_lamb(plan: str) -> None:
    assert differences(2, plan, ["muon", "lamb"]) == {}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "tp=2"])
def test_every_optimizer(plan: str) -> None:
    assert differences(2, plan, [*OPTIMIZERS]) == {}


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", "zero1"])
def test_real_and_complex_parameters(plan: str) -> None:
    assert differences(3, plan, ["sgd", "lamb"], has_complex=True) == {}


@pytest.mark.parametrize("plan", ["zero2", "zero3", "hsdp", "dp=2,tp=2", "dp=2,pp=2,zero=2,microbatches=2"])
def test_shards_of_real_and_complex_parameters_are_refused(plan: str) -> None:
    spec, resolved = Spec(batch=8), parse(plan).resolve(4)
    validate_plan(spec, resolved, Odd())
    with pytest.raises(PlanError, match="float32 and spectrum with complex64; use ddp or zero1"):
        validate_plan(spec, resolved, Odd(has_complex=True))
    validate_plan(spec, ResolvedPlan(dp=4, zero=1), Odd(has_complex=True))


def train_with_phase(plan: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("sgd", "lamb"):
        spec = Spec(
            steps=5, batch=12, seed=3, precision="fp64", optimizer=Optimizer(name=name, lr=0.01, clip=0.5)
        )
        found[name] = train_on_this_rank(Odd(has_phase=True), spec, plan).weights
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero3"),
        pytest.param(3, "zero2", marks=pytest.mark.slow),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(2, "pp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param(4, "hsdp", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,tp=2,zero=3", marks=pytest.mark.slow),
    ],
)
def test_complex_scalars(size: int, plan: str) -> None:
    [expected] = ranks(1)(train_with_phase, "single")
    assert expected["sgd"]["phase"].imag != pytest.approx(0.3, abs=1e-3)  # it is trained
    on_ranks = ranks(size)(train_with_phase, plan)
    for name, of_one in expected.items():
        weights: dict[str, Any] = {}
        for of_rank in on_ranks:
            weights |= of_rank[name]
        assert max(relative_difference(weights[key], of_one[key]) for key in of_one) <= 1e-10


def test_frozen_parameters_and_groups() -> None:
    before, after = Net(False), train_each("single", ["lamb"])["lamb"]
    optimizer = make_optimizer(Odd(), Optimizer(name="lamb", groups=GROUPS), ResolvedPlan(), before)
    sizes = {group["lr"]: sum(p.numel() for p in group["params"]) for group in optimizer.param_groups}
    assert sizes == {0.001: 11 * 6 + 6 + 1, 0.002: 6 * 6 * 3 + 6, 0.003: 6 * 6}
    assert "frozen.weight" in after
    assert "head.weight" in after or "embedding.weight" in after


@pytest.mark.parametrize("name", OWN)
def test_parameters_without_a_gradient_keep_their_state(name: str) -> None:
    """A parameter with gradients in two of four steps equals one that makes only these two steps."""
    values = random_normal(2, 5, 4, seed=1)
    grads = random_normal(4, 2, 5, 4, seed=2)

    def train(steps: list[tuple[bool, bool]]) -> list[Tensor]:
        model = nn.ParameterList(value.clone() for value in values)
        options = {"adamw": ""} if name == "muon" else {}
        optimizer = make_optimizer(
            Odd(),
            Optimizer(name=name, lr=0.01, **options),
            ResolvedPlan(),
            model,
        )
        for step, has_gradient in enumerate(steps):
            for at, parameter in enumerate(model):
                parameter.grad = grads[step, at].clone() if has_gradient[at] else None
            optimizer.step()
        return [parameter.detach() for parameter in model]

    found = train([(True, True), (True, False), (True, True), (True, False)])
    always = train([(True, False)] * 4)
    seldom = train([(False, True), (False, False), (False, True), (False, False)])
    assert torch.equal(found[0], always[0])
    assert torch.equal(found[1], seldom[1])
    assert not torch.equal(found[1], values[1])


@pytest.mark.parametrize("name", [name for name in OWN if name != "adafactor"])
def test_complex_numbers_are_pairs(name: str) -> None:
    """The update of a complex tensor is that of its real view."""
    values, grads = random_normal(6, 3, 2, seed=1), random_normal(3, 6, 3, 2, seed=2)

    def train(is_complex: bool) -> Tensor:
        parameter = nn.Parameter(torch.view_as_complex(values.clone()) if is_complex else values.clone())
        model = nn.ParameterList([parameter])
        optimizer = make_optimizer(Odd(), Optimizer(name=name, lr=0.01), ResolvedPlan(), model)
        for grad in grads:
            parameter.grad = torch.view_as_complex(grad.clone()) if is_complex else grad.clone()
            optimizer.step()
        return torch.view_as_real(parameter.detach()) if is_complex else parameter.detach()

    assert torch.equal(train(True), train(False))


def test_complex_numbers_are_refused_by_adafactor() -> None:
    message = "optimizer.name=adafactor does not support complex parameters, such as spectrum; use adamw"
    with pytest.raises(SpecError, match=message):
        make_optimizer(Odd(), Optimizer(name="adafactor"), ResolvedPlan(), Net(True))

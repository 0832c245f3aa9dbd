"""Updates in pieces of the size of the cache equal those of torch, and of whole tensors bit by bit."""

import copy
import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import relative_difference
from models import random_normal
from paceline import Task
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer
from paceline.training.optimization import optimizer as module
from paceline.training.optimization.optimizer import compile_updates, make_optimizer
from paceline.training.optimizers import elementwise, lamb, pieces, whole_tensor
from paceline.training.optimizers.build import ON_CPU

SHAPES = [(60, 70), (3,), (50, 60), (7, 9), (4, 6, 10, 10), (1,), (), (0, 3), (9, 8)]
STEPS = 8  # RAdam divides by the second moment from its sixth step
PIECE = 1024

TORCH = {
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adamax", {}),
    ("adamax", {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("nadam", {}),
    ("nadam", {"weight_decay": 0.1, "momentum_decay": 0.02}),
    ("nadam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", {}),
    ("radam", {"weight_decay": 0.1}),
    ("radam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.99)}),
    ("adadelta", {"rho": 0.8}),
    ("adadelta", {"weight_decay": 0.1, "eps": 1e-3}),
    ("rmsprop", {}),
    ("rmsprop", {"weight_decay": 0.1, "alpha": 0.9}),
    ("rmsprop", {"momentum": 0.7}),
    ("rmsprop", {"centered": True, "weight_decay": 0.1}),
    ("rmsprop", {"centered": True, "momentum": 0.7}),
]
IDS = [" ".join([name, *map(str, options)]) for name, options in OPTIONS]


def build_parameters(dtype: torch.dtype = torch.float64) -> nn.ParameterList:
    """Return tensors with elements in any order in memory, one of them complex."""
    model = nn.ParameterList(
        random_normal(*(shape or (1,)), seed=at).view(shape).to(dtype) for at, shape in enumerate(SHAPES)
    )
    model[2] = nn.Parameter(model[2].detach().T)
    model[4] = nn.Parameter(model[4].detach().to(memory_format=torch.channels_last))
    model[8] = nn.Parameter(model[8].detach()[:, ::2])  # with gaps in memory
    if dtype == torch.float64:
        model.append(nn.Parameter(torch.complex(*(random_normal(5, 4, seed=s).double() for s in (11, 12)))))
    return model


def set_gradients(model: nn.ParameterList, step: int) -> None:
    """Set random gradients in another order than the weights; the second tensor has none at first."""
    for at, parameter in enumerate(model):
        grad = (
            random_normal(parameter.numel(), seed=100 * step + at).to(parameter.dtype).view(parameter.shape)
        )
        is_late = at == 1 and step < 2
        parameter.grad = None if is_late else grad


def train(optimizer: torch.optim.Optimizer, model: nn.ParameterList, steps: range = range(STEPS)) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def build(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return make_optimizer(Task(), Optimizer(name=name, lr=0.01, **options), ResolvedPlan(), model)


def find_difference(found: nn.ParameterList, expected: nn.ParameterList) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a.numel()]
    return max(relative_difference(a.detach(), b.detach()) for a, b in pairs)


def compare_with_torch(name: str, options: dict[str, Any]) -> float:
    """Return the relative difference to torch's optimizer, which continues from the state of ours."""
    model, twin = build_parameters(), build_parameters()
    ours = build(name, model, **options)
    assert type(ours) is ON_CPU[name]
    theirs = TORCH[name](twin.parameters(), lr=0.01, foreach=False, **options)
    train(ours, model)
    train(theirs, twin)
    differences = [find_difference(model, twin)]
    # A training may continue on a GPU with torch's optimizer.
    theirs.load_state_dict(
        copy.deepcopy(ours.state_dict()) | {"param_groups": theirs.state_dict()["param_groups"]}
    )
    for parameter, own in zip(twin, model, strict=True):
        parameter.data.copy_(own.data)
    for optimizer, of_optimizer in ((ours, model), (theirs, twin)):
        train(optimizer, of_optimizer, range(STEPS, STEPS + 2))
    return max(*differences, find_difference(model, twin))


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_updates_equal_torch(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", PIECE)
    assert compare_with_torch(name, options) < 1e-11


def test_own_code_for_each_is_tested() -> None:
    assert TORCH.keys() == ON_CPU.keys() == {name for name, _ in OPTIONS}


def last_piece_left_out(*lists: Any, **options: Any) -> Any:
    return list(pieces.iterate_pieces(*lists, **options))[:-1]


def first_moments_forgotten(targets: Any, grads: Any, firsts: Any, seconds: Any, **options: Any) -> None:
    elementwise.subtract_adam_(targets, grads, torch._foreach_clone(firsts), seconds, **options)


@pytest.mark.parametrize(
    ("name", "replaced", "fault"),
    [
        ("rmsprop", "iterate_pieces", last_piece_left_out),
        ("radam", "subtract_adam_", first_moments_forgotten),
    ],
    ids=["last piece", "first moments"],
)
def test_mistakes_are_caught(name: str, replaced: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(importlib.import_module(ON_CPU[name].__module__), replaced, fault)
    assert compare_with_torch(name, {}) > 1e-6


@pytest.mark.parametrize("name", [*ON_CPU, "lion", "novograd", "lars", "lamb", "muon"])
def test_pieces_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in norms, and at the ends of pieces, whose elements the fused kernel rounds differently."""

    def train_in(elements: int) -> nn.ParameterList:
        monkeypatch.setattr(pieces, "PIECE_ELEMENTS", elements)
        model = build_parameters(torch.float32)
        train(build(name, model, weight_decay=0.1), model)
        return model

    found, expected = train_in(PIECE), train_in(10**9)
    if name in ("novograd", "lars", "lamb", "nadam", "rmsprop"):
        assert find_difference(found, expected) < 1e-5
    else:
        assert all(map(torch.equal, found, expected))


COMPILED = [
    ("lion", {"betas": (0.8, 0.95)}),
    ("lion", {"weight_decay": 0.1}),
    ("lamb", {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("lamb", {"bias_correction": False, "eps": 1e-3}),
    *((name, options) for name, options in OPTIONS if name in ("adamax", "nadam", "adadelta")),
]


def compare_compiled(name: str, options: dict[str, Any], dtype: torch.dtype) -> float:
    """Return the relative difference of compiled updates to plain ones, with a learning rate that falls."""

    def train_with(is_compiled: bool) -> nn.ParameterList:
        model = build_parameters(dtype)
        optimizer = build(name, model, **options)
        if is_compiled:
            compile_updates(optimizer)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.01 * 0.9**step
            train(optimizer, model, range(step, step + 1))
        return model

    return find_difference(train_with(True), train_with(False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch 2.13, in its own imports
@pytest.mark.parametrize(("name", "options"), COMPILED, ids=lambda value: str(value))
def test_compiled_updates_equal_plain_ones(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILED_ELEMENTS", 50)
    compiled: set[Any] = set()
    compile_update = whole_tensor.compile_update
    monkeypatch.setattr(
        whole_tensor, "compile_update", lambda update: (compiled.add(update), compile_update(update))[1]
    )
    assert compare_compiled(name, options, torch.float64) < 1e-11
    assert compare_compiled(name, options, torch.float32) < 1e-5
    (update,) = compiled
    monkeypatch.setattr(whole_tensor, "compile_update", lambda found: partial(run_without_last, found))
    assert compare_compiled(name, options, torch.float64) > 1e-6
    # Lengths and numbers change without another compilation, and a dtype needs one.
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(update)) <= 2


def run_without_last(update: Any, *arguments: Tensor) -> None:
    """Update all elements except the last."""
    *tensors, numbers = arguments
    update(*(tensor[:-1] for tensor in tensors), numbers)


MOMENTUM: list[tuple[str, dict[str, Any]]] = [
    ("lars", {"weight_decay": 0.1, "trust_coefficient": 1.0}),
    ("lars", {"momentum": 0.0, "weight_decay": 0.1, "trust_coefficient": 1.0}),
    ("lars", {"convention": "timm", "weight_decay": 0.1, "trust_coefficient": 0.1}),
    ("novograd", {}),
    ("novograd", {"weight_decay": 0.1, "grad_averaging": True}),
    ("novograd", {"weight_decay": 0.1, "betas": (0.0, 0.9)}),
]


@pytest.mark.parametrize(("name", "options"), MOMENTUM)
@pytest.mark.parametrize("is_tiny", [False, True], ids=["", "tiny"])
def test_the_kernel_of_sgd_equals_pieces(
    name: str, options: dict[str, Any], is_tiny: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, beside pieces in float64. A tiny scale has no digits in `1 - dampening`."""

    def train_in(dtype: torch.dtype) -> nn.ParameterList:
        model = nn.ParameterList([random_normal(60, 70).to(dtype), random_normal(7, 3).T.to(dtype)])
        optimizer = build(name, model, **options)
        for step in range(4):
            for at, parameter in enumerate(model):
                grad = random_normal(*parameter.shape, seed=10 * step + at) * (1e14 if is_tiny else 1.0)
                parameter.grad = torch.empty_like(parameter).copy_(grad)
            optimizer.step()
        return model

    calls: list[int] = []
    kernel = torch._fused_sgd_
    monkeypatch.setattr(
        torch, "_fused_sgd_", lambda *args, **given: (calls.append(1), kernel(*args, **given))
    )
    expected = train_in(torch.float64)
    assert not calls
    found = train_in(torch.float32)
    has_no_momentum = options.get("betas", (0.9, 0.9))[0] == 0  # but a state for it
    is_rounded = is_tiny and options.get("momentum") != 0
    assert len(calls) == (0 if is_rounded or has_no_momentum else 8)
    start = nn.ParameterList([random_normal(60, 70), random_normal(7, 3).T])
    assert find_difference(found, expected) < 1e-6
    moved = [
        relative_difference((b - a).detach(), (c - a).detach())
        for a, b, c in zip(start, found, expected, strict=True)
    ]
    assert is_tiny or max(moved) < 1e-3


def test_gradients_stay_as_they_are() -> None:
    for name in (*ON_CPU, "lion", "novograd", "lars", "lamb"):
        model = build_parameters()
        optimizer = build(name, model, weight_decay=0.1)
        train(optimizer, model)
        found: list[Tensor | None] = [parameter.grad for parameter in model]
        set_gradients(model, STEPS - 1)
        for grad, parameter in zip(found, model, strict=True):
            assert torch.equal(grad, parameter.grad), name


def test_norms_of_pieces_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trust ratio of each piece differs from that of the tensor."""

    def train_in(elements: int) -> Tensor:
        monkeypatch.setattr(pieces, "PIECE_ELEMENTS", elements)
        model = nn.ParameterList([random_normal(5000)])
        model[0].grad = random_normal(5000, seed=1)
        build("lamb", model).step()
        return model[0].detach()

    expected = train_in(10**9)
    assert torch.allclose(train_in(PIECE), expected, rtol=1e-5)
    firsts = partial(map, lambda tensor: tensor.view(-1)[:PIECE])
    monkeypatch.setattr(lamb, "squares", lambda *lists: whole_tensor.squares(*map(list, map(firsts, lists))))
    assert not torch.allclose(train_in(PIECE), expected, rtol=1e-5)


def test_sums_of_squares_of_several_types() -> None:
    """Small tensors of a piece may differ in type; float16 holds no sum of the squares of these."""
    tensors = [
        torch.full((300,), 30.0, dtype=torch.float16),
        torch.full((2,), 2.0, dtype=torch.float64),
        torch.full((5,), 3.0),
        torch.full((7,), 0.5, dtype=torch.bfloat16),
    ]
    assert [float(sums) for sums in whole_tensor.squares(tensors)] == pytest.approx([270000, 8, 45, 1.75])

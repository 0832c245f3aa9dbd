"""Optimizers compared with those of pytorch_optimizer and timm, step by step on one process in float64."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.training.optimizers.lamb import Lamb
from paceline.training.optimizers.lars import Lars
from paceline.training.optimizers.lion import Lion
from paceline.training.optimizers.novograd import NovoGrad

SHAPES = ((5, 7), (3, 2, 2, 2), (6,))
STEPS = 8
DTYPE = torch.float64
Options = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]


def load_pytorch_optimizer() -> Any:
    return pytest.importorskip("pytorch_optimizer")


@cache
def load_timm() -> SimpleNamespace:
    """Return optimizers of timm. The package itself imports torchvision, which may not fit torch."""
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        pytest.skip("timm is not installed")
    folder = Path(found.origin).parent
    package, optimizers = ModuleType("timm"), ModuleType("timm.optim")
    package.__path__, optimizers.__path__ = [str(folder)], [str(folder / "optim")]
    with patch.dict(sys.modules, {"timm": package, "timm.optim": optimizers}):
        return SimpleNamespace(
            Lamb=importlib.import_module("timm.optim.lamb").Lamb,
            Lars=importlib.import_module("timm.optim.lars").Lars,
            Lion=importlib.import_module("timm.optim.lion").Lion,
            NvNovoGrad=importlib.import_module("timm.optim.nvnovograd").NvNovoGrad,
        )


def train(make: Make, options: Options, of_vectors: Options) -> list[Tensor]:
    """Return the weights after each step. of_vectors: options of tensors with one dimension."""
    generator = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=DTYPE)) for shape in SHAPES]
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() == 1]
    optimizer = make([{"params": matrices}, {"params": vectors, **of_vectors}], **options)
    after = []
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=DTYPE) + 0.3 * weight
        optimizer.step()
        after.append(torch.cat([weight.detach().flatten() for weight in weights]))
    return after


def compare(own: Make, options: Options, other: Make, of_other: Options, of_vectors: Options) -> float:
    """Return the largest relative difference between the weights of both optimizers after any step."""
    pairs = zip(train(own, options, of_vectors), train(other, of_other, of_vectors), strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


CASES: dict[str, tuple[Callable[[], Any], str, Options, Make, Options, Options]] = {
    "lars, pytorch_optimizer": (
        load_pytorch_optimizer,
        "LARS",
        {"lr": 0.5, "weight_decay": 0.02, "momentum": 0.8, "trust_coefficient": 0.1},
        Lars,
        {"convention": "timm", "eps": 0.0},
        {"weight_decay": 0.0},
    ),
    "lars with Nesterov's momentum, pytorch_optimizer": (
        load_pytorch_optimizer,
        "LARS",
        {"lr": 0.5, "weight_decay": 0.02, "momentum": 0.8, "trust_coefficient": 0.1, "nesterov": True},
        Lars,
        {"convention": "timm", "eps": 0.0},
        {"weight_decay": 0.0},
    ),
    "lars, timm": (
        load_timm,
        "Lars",
        {"lr": 0.5, "weight_decay": 0.02, "momentum": 0.8, "eps": 1e-3},
        Lars,
        {"convention": "timm"},
        {"weight_decay": 0.0},
    ),
    "novograd, pytorch_optimizer": (
        load_pytorch_optimizer,
        "NovoGrad",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.9, 0.7), "eps": 1e-3},
        NovoGrad,
        {},
        {},
    ),
    "novograd, timm": (
        load_timm,
        "NvNovoGrad",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.9, 0.7), "eps": 1e-3, "grad_averaging": True},
        NovoGrad,
        {},
        {},
    ),
    "lion, pytorch_optimizer": (
        load_pytorch_optimizer,
        "Lion",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.8, 0.7)},
        Lion,
        {},
        {},
    ),
    "lion, timm": (
        load_timm,
        "Lion",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.8, 0.7)},
        Lion,
        {},
        {},
    ),
    "lamb, timm": (
        load_timm,
        "Lamb",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.8, 0.7), "eps": 1e-3},
        Lamb,
        {"convention": "timm"},
        {"weight_decay": 0.0},
    ),
    "lamb without bias correction, timm": (
        load_timm,
        "Lamb",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.8, 0.7), "eps": 1e-3, "bias_correction": False},
        Lamb,
        {"convention": "timm"},
        {"weight_decay": 0.0},
    ),
    "lamb that adapts every tensor, timm": (
        load_timm,
        "Lamb",
        {"lr": 0.1, "weight_decay": 0.02, "betas": (0.8, 0.7), "eps": 1e-3},
        Lamb,
        {},
        {"weight_decay": 0.0},
    ),
}
# Options under which the other program computes the same, where it has them under another name
ONLY_OF_OTHER: dict[str, Options] = {
    "lars, timm": {"trust_coeff": 0.1},
    "lamb, timm": {"max_grad_norm": None},
    "lamb without bias correction, timm": {"max_grad_norm": None},
    "lamb that adapts every tensor, timm": {"max_grad_norm": None, "always_adapt": True},
}
ONLY_OF_OWN: dict[str, Options] = {"lars, timm": {"trust_coefficient": 0.1}}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Let timm's NovoGrad keep its norms in float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("case", CASES)
def test_same_updates(case: str) -> None:
    load, name, options, own, of_own, of_vectors = CASES[case]
    other = getattr(load(), name)
    difference = compare(
        own,
        options | of_own | ONLY_OF_OWN.get(case, {}),
        other,
        options | ONLY_OF_OTHER.get(case, {}),
        of_vectors,
    )
    assert difference < 1e-12


def test_another_convention_is_another_update() -> None:
    """The comparison has to find what distinguishes the conventions."""
    options = {"lr": 0.5, "weight_decay": 0.02, "momentum": 0.8, "trust_coefficient": 0.1}
    other = load_pytorch_optimizer().LARS
    assert compare(Lars, options, other, options, {"weight_decay": 0.0}) > 1e-4

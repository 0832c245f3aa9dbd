"""Each optimizer on tensors of unusual shapes and layouts: shards are updated as whole tensors are."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import models
from faults import replaced
from harness import ranks, to_whole_array
from models import random_normal
from paceline.optimizer_options import OPTIMIZERS
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer
from paceline.training.optimization.optimizer import make_optimizer
from paceline.training.optimizers import whole_tensor

STEPS = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "empty": (0,),
    "vector": (5,),
    "no_rows": (0, 4),
    "no_columns": (4, 0),
    "row": (1, 9),
    "matrix": (3, 7),
    "kernel": (5, 3, 2, 2),
    "channels_last": (4, 3, 2, 2),
    "seldom": (6, 2),  # has no gradient in each second step
}
DTYPES = {"bf16_vector": torch.bfloat16, "bf16_matrix": torch.bfloat16}
SHAPES |= {"bf16_vector": (7,), "bf16_matrix": (5, 4)}
# The dimension that a layout shards; tensors with fewer are replicated.
LAYOUTS = {"whole": None, "ddp": None, "zero3": 0, "tp": 1}


def draw(name: str, seed: int) -> Tensor:
    shape, number = SHAPES[name], [*SHAPES].index(name)
    values = random_normal(math.prod(shape), seed=seed + 100 * number).view(shape)
    values = values.to(DTYPES.get(name, torch.float64))
    return values.to(memory_format=torch.channels_last) if name == "channels_last" else values


def place(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor as a plan distributes it over the ranks."""
    if layout in ("whole", "ddp"):
        return tensor
    dim = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    is_cut = dim is not None and tensor.dim() > dim
    return distribute_tensor(tensor, mesh, [Shard(dim) if is_cut else Replicate()])


class Parameters(nn.Module):
    """The tensors as parameters; those with four dimensions are of convolutions, which Muon recognizes."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            parameter = nn.Parameter(place(draw(name, 0), layout))
            if len(shape) == 4:
                convolution = nn.Conv2d(1, 1, 1, bias=False)
                convolution.weight = parameter
                self.add_module(name, convolution)
            else:
                self.register_parameter(name, parameter)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield name.removesuffix(".weight"), parameter


def update(name: str, layout: str) -> dict[str, Any]:
    """Return the whole tensors after a few updates with given gradients."""
    options = {"muon": {"adamw": "", "ns_precision": "full"}, "lars": {"trust_coefficient": 0.1}}
    spec = Optimizer(name=name, lr=0.05, **options.get(name, {}))
    if name != "rprop":
        spec = spec.model_copy(update={"weight_decay": 0.1})
    model = Parameters(layout)
    optimizer = make_optimizer(models.Points(), spec, ResolvedPlan(), model)
    for step in range(1, STEPS + 1):
        for key, parameter in model.named_tensors():
            has_gradient = key != "seldom" or step % 2
            parameter.grad = place(draw(key, step), layout) if has_gradient else None
        optimizer.step()
    return {key: widen(parameter) for key, parameter in model.named_tensors()}


def widen(parameter: Tensor) -> Any:
    """Return a whole parameter as an array, in a data type that NumPy has."""
    values = parameter.detach()
    whole = values.full_tensor() if isinstance(values, DTensor) else values
    return to_whole_array(whole.double())


def update_each(layout: str, names: list[str], fault: Any = None) -> dict[str, dict[str, Any]]:
    if fault is None:
        return {name: update(name, layout) for name in names}
    with fault():
        return {name: update(name, layout) for name in names}


def largest_difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two arrays, relative to the largest element; infinite for NaN."""
    assert found.shape == expected.shape
    if not expected.size:
        return 0.0
    error = float(abs(found - expected).max() / abs(expected).max())
    return error if error == error else float("inf")


def differences(layout: str, names: list[str], fault: Any = None) -> dict[str, list[str]]:
    """Return, for each optimizer, the tensors that differ from those of one process."""
    found: dict[str, list[str]] = {}
    expected = update_each("whole", names)
    for on_rank in ranks(2)(update_each, layout, names, fault):
        for name in names:
            for key, value in expected[name].items():
                limit = 2**-7 if key in DTYPES else 1e-10  # a bit of bf16
                if not largest_difference(on_rank[name][key], value) <= limit:
                    found.setdefault(name, []).append(key)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_tensor_changes(name: str) -> None:
    for key, value in update(name, "whole").items():
        before = widen(draw(key, 0))
        assert value.shape == before.shape
        assert not value.size or largest_difference(value, before) > 1e-4, key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_follows_float64(dtype: torch.dtype) -> None:
    """torch's fused SGD updates vectors of 16 elements and more wrongly on a CPU."""
    errors = {}
    for name in ("adamw", "adam", "sgd", "adagrad"):
        trained = []
        for kind in (dtype, torch.float64):
            model = nn.ParameterList([random_normal(64).bfloat16().to(kind)])
            optimizer = make_optimizer(models.Points(), Optimizer(name=name, lr=0.05), ResolvedPlan(), model)
            for seed in range(1, 7):
                model[0].grad = random_normal(64, seed=seed).bfloat16().to(kind)
                optimizer.step()
            trained.append(widen(model[0]))
        errors[name] = largest_difference(*trained)
    assert {name: error for name, error in errors.items() if error > 0.02} == {}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero3", "tp"])
def test_shards_of_each_shape(layout: str) -> None:
    assert differences(layout, [*OPTIMIZERS]) == {}


def norms_of_shards() -> Any:
    """Leave out the sum over shards."""
    return replaced(whole_tensor, "sum_shards", lambda original: lambda params, parts: [*map(list, parts)])


@pytest.mark.processes
@pytest.mark.slow
def test_norms_of_shards_are_caught() -> None:
    found = differences("zero3", ["lars", "lamb", "novograd", "adafactor"], norms_of_shards)
    assert all({"kernel", "channels_last", "matrix"} <= set(keys) for keys in found.values()), found
    assert len(found) == 4

"""The tensors of a model and its optimizers, by their names in a checkpoint."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.training.init.named_tensors import find_aliases, named_tensors
from paceline.training.optimization.optimizer import local_optimizer
from paceline.training.optimization.optimizer_values import collect_values

AVERAGES = "ema/"  # prefix of the names of moving averages


def rank_prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's state."""
    return f"rank/{rank}/"


def collect_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict of `model`, each once under its first name.

    Tensors of other pipeline stages are on the meta device.
    """
    names = model.state_dict().keys()
    return {name: tensor.detach() for name, tensor in named_tensors(model).items() if name in names}


def collect_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], elsewhere: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the state of model and optimizers on this rank, by names in a checkpoint.

    optimizers: each parameter belongs to one of them at most.
    elsewhere: names of parameters that another pipeline stage writes.
    """
    state = {
        f"model/{name}": tensor
        for name, tensor in collect_model_tensors(model).items()
        if is_materialized(tensor) and name not in elsewhere
    }
    # Read parameters only now: a state dict makes `fully_shard` put its shards back in place of whole
    # parameters.
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters() if name not in elsewhere
    }
    for index, optimizer in enumerate(optimizers):
        values = collect_values(local_optimizer(optimizer), names, index)
        state |= {f"optimizer/{name}": value for name, value in values.items()}
    return state


def find_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of `model` in a checkpoint."""
    return frozenset(f"model/{name}" for name, _ in model.named_buffers())


def select_written(
    state: Mapping[str, Tensor], copy: int, copies: int, buffers: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the part of the state that this rank writes.

    These are its shards, and a share by size of what all copies of its layers hold. The first copy writes
    `buffers`, whose values may differ between copies. `copy`: the number of this rank's copy of its layers,
    of `copies`.
    """
    keys = sorted(state)
    sizes = [0 if is_dtensor(state[key]) or key in buffers else state[key].numel() for key in keys]
    owners = balance_by_size(sizes, copies)
    return {
        key: state[key]
        for key, owner in zip(keys, owners, strict=True)
        if is_dtensor(state[key]) or copy == (0 if key in buffers else owner)
    }


def describe_tensors(model: nn.Module) -> dict[str, Any]:
    """Return the fields of an Index that describe the model."""
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in collect_model_tensors(model).items()},
        "tied": find_aliases(model),
    }

"""A task without dropout, which differs by intent between plans."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from paceline.task import Task


def disable_dropout(
    task: Task,
    report: Callable[[list[str]], None] = lambda names: None,
    context: AbstractContextManager[Any] | None = None,
) -> Task:
    """Return `task` without dropout in its model and without a validation split.

    report: called with the names of the disabled rates. context: entered around forward pass and loss."""
    wrapped = copy.copy(task)

    def model() -> nn.Module:
        built = task.model()
        if isinstance(built, nn.Module):
            report(disable_dropout_(built))
            if context is not None:
                built.register_forward_pre_hook(lambda *_: context.__enter__() and None)
                built.register_forward_hook(lambda *_: context.__exit__(None, None, None), always_call=True)
        return built

    def dataset(split: str) -> Any:
        return task.dataset(split) if split == "train" else None

    def loss(output: Any, batch: Any) -> Any:
        with context or nullcontext():
            return task.loss(output, batch)

    def global_loss(output: Any, batch: Any) -> Any:
        with context or nullcontext():
            return task.global_loss(output, batch)

    def batch_sums(output: Any, batch: Any) -> Any:
        with context or nullcontext():
            return task.batch_sums(output, batch)

    def auxiliary_loss(sums: Any) -> Any:
        with context or nullcontext():
            return task.auxiliary_loss(sums)

    methods = {"model": model, "dataset": dataset, "loss": loss, "global_loss": global_loss}
    methods |= {"batch_sums": batch_sums, "auxiliary_loss": auxiliary_loss}
    for name, method in methods.items():
        object.__setattr__(wrapped, name, method)  # tasks are frozen
    return wrapped


def disable_dropout_(model: nn.Module) -> list[str]:
    """Set each rate of dropout to 0, and return the names of the rates.

    These are the rates of dropout layers, and each number with "drop" in its name in a module or in its
    config, as in torch's attention and in Hugging Face models."""
    names: list[str] = []
    for path, module in model.named_modules():
        is_dropout = "drop" in type(module).__name__.lower()
        names += [f"{path}.{key}" if path else key for key in _zero_rates_(module, is_dropout)]
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__") and not isinstance(config, nn.Module):
            names += [f"config.{key}" for key in _zero_rates_(config, False)]
    return names


def _zero_rates_(owner: Any, is_dropout: bool) -> list[str]:
    keys = [
        key
        for key, value in vars(owner).items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ("drop" in key.lower() or (is_dropout and key == "p"))
    ]
    for key in keys:
        setattr(owner, key, 0.0)
    return keys

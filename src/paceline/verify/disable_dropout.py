"""A task without what may differ from one layout to the next by intent: dropout."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from paceline.task import Task


def quiet(
    task: Task,
    say: Callable[[list[str]], None] = lambda switched_off: None,
    around: AbstractContextManager[Any] | None = None,
) -> Task:
    """`task` with dropout switched off in its model, and without a validation split. `say` is called with what was switched off.
    Forward pass and loss run within `around`."""
    calm = copy.copy(task)

    def model() -> nn.Module:
        built = task.model()
        if isinstance(built, nn.Module):
            say(switch_dropout_off_(built))
            if around is not None:
                built.register_forward_pre_hook(lambda *_: around.__enter__() and None)
                built.register_forward_hook(lambda *_: around.__exit__(None, None, None), always_call=True)
        return built

    def dataset(split: str) -> Any:
        return task.dataset(split) if split == "train" else None

    def loss(output: Any, batch: Any) -> Any:
        with around or nullcontext():
            return task.loss(output, batch)

    for name, method in (("model", model), ("dataset", dataset), ("loss", loss)):
        object.__setattr__(calm, name, method)  # tasks are frozen
    return calm


def switch_dropout_off_(model: nn.Module) -> list[str]:
    """Set each rate of dropout to 0: of dropout layers, and whatever else is a number and named so in a module or in its
    configuration, as in torch's attention and in Hugging Face models. Returns their names."""
    found: list[str] = []
    for path, module in model.named_modules():
        of_dropout = "drop" in type(module).__name__.lower()
        found += [f"{path}.{key}" if path else key for key in _zero_(module, of_dropout)]
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__") and not isinstance(config, nn.Module):
            found += [f"config.{key}" for key in _zero_(config, False)]
    return found


def _zero_(owner: Any, of_dropout: bool) -> list[str]:
    keys = [
        key
        for key, value in vars(owner).items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ("drop" in key.lower() or (of_dropout and key == "p"))
    ]
    for key in keys:
        setattr(owner, key, 0.0)
    return keys

"""Update: a part of a training step with an optimizer of its own, which `Task.updates` may return.

from paceline import Update

def updates(self):
    return [
        Update("critic", params="critic.*", loss=self.critic_loss, repeat=5),
        Update("generator", params="generator.*", loss=self.generator_loss, inputs=self.generator_inputs),
    ]
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import TaskError
from paceline.spec import Optimizer, Schedule

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """An optimizer of some parameters, with the loss that it minimizes.

    All updates of a step see the same batch, one after the other. An update with a loss runs its own forward
    and backward pass, on the weights that the updates before it have changed. Updates without a loss share
    one pass of the task's `loss` and are applied together.

    name: unique in the task; the loss is reported under it.
    params: pattern of the names of its parameters, such as "critic.*", or a tuple of patterns. Each trained
    parameter of the model belongs to exactly one update.
    loss: method with the arguments and the result of `Task.loss`; None: the loss of the task.
    inputs: method that returns the arguments of the model for this loss; None: `Task.inputs`.
    repeat: number of updates in each step, each on the same batch with new random numbers. Requires `loss`.
    every: number of steps between two updates: 5: in steps 5, 10, 15 and so on.
    start: number of steps before the first update; its parameters are frozen until then.
    optimizer: `paceline.spec.Optimizer`; None: that of the spec. Its `clip` limits the norm of the gradient
    of this update.
    schedule: `paceline.spec.Schedule` of the learning rate; None: that of the spec.

    Raises TaskError for other values.
    """

    name: str
    params: str | tuple[str, ...]
    loss: Callable[..., Any] | None = None
    inputs: Callable[..., Any] | None = None
    repeat: int = 1
    every: int = 1
    start: int = 0
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[^\W\d][\w-]*", self.name):
            raise TaskError(f"Update: name must be a word such as 'critic', got {self.name!r}")
        patterns = (self.params,) if isinstance(self.params, str) else self.params
        if (
            not isinstance(patterns, tuple)
            or not patterns
            or not all(isinstance(pattern, str) for pattern in patterns)
        ):
            raise TaskError(
                f"Update {self.name}: params must be a pattern of names, such as 'critic.*', or a tuple of "
                f"patterns, got {self.params!r}"
            )
        for name, least in (("repeat", 1), ("every", 1), ("start", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TaskError(
                    f"Update {self.name}: {name} must be an integer, at least {least}, got {value!r}"
                )
        for name in ("loss", "inputs"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TaskError(
                    f"Update {self.name}: {name} must be a method, such as self.critic_{name}, got {value!r}"
                )
        if self.loss is None and (self.inputs is not None or self.repeat > 1):
            what = "inputs" if self.inputs is not None else f"repeat={self.repeat}"
            raise TaskError(f"Update {self.name}: {what} requires loss, such as loss=self.loss")
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TaskError(
                    f"Update {self.name}: {name} must be a paceline.spec.{kind.__name__}, got "
                    f"{type(value).__name__}"
                )

    def matches(self, name: str) -> bool:
        """Return whether a parameter with this name belongs to the update."""
        patterns = (self.params,) if isinstance(self.params, str) else self.params
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def is_due(self, step: int) -> bool:
        """Return whether it takes part in a step. `step`: steps done before."""
        return step >= self.start and (step + 1) % self.every == 0

    def next_due(self, step: int) -> int:
        """Return the first step in which it takes part, `step` or a later one. Both are steps done before."""
        step = max(step, self.start)
        return step + -(step + 1) % self.every

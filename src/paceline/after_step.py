"""Operations on weights after each step, which `Task.after_step` may return.

from paceline.after_step import CopyTo, Ema

def after_step(self):
    return [Ema(decay=0.999), CopyTo("online", "target", every=100)]

A task declares operations and never computes on weights, because a rank may hold only shards of them. Names
are those of the model's parameters and modules.
"""

import math
from dataclasses import dataclass
from typing import Any

from paceline.errors import TaskError

__all__ = ["Clamp", "CopyTo", "Ema", "Normalize", "Polyak", "StepOperation", "Swa"]


@dataclass(frozen=True)
class StepOperation:
    """Base class of the operations."""


@dataclass(frozen=True)
class Ema(StepOperation):
    """Keep an exponential moving average of weights beside the model.

    After each step, average = decay · average + (1 - decay) · weights. It starts from the initial weights.
    Evaluations use the average; checkpoints contain it, and `paceline export --ema` writes it.

    decay: at least 0 and below 1.
    params: pattern of the names of the averaged parameters, such as "encoder.*".
    every: number of steps between two updates.
    warmup: let the decay grow to its value: min(decay, (1 + n) / (10 + n)) in update n, from 0.
    evaluates: False: evaluations use the weights themselves.

    Buffers are not averaged. Raises TaskError for other values.
    """

    decay: float = 0.999
    params: str = "*"
    every: int = 1
    warmup: bool = False
    evaluates: bool = True

    def __post_init__(self) -> None:
        _check_number(self, "decay", 0, 1, below=True)
        _check_every(self)


@dataclass(frozen=True)
class Swa(StepOperation):
    """Keep the mean of the weights from a step on beside the model (stochastic weight averaging).

    Izmailov et al., Averaging weights leads to wider optima and better generalization, 2018. Before `start`,
    the mean is the weights. Evaluations use the mean; checkpoints contain it, and `paceline export --ema`
    writes it.

    start: number of steps after which the first weights are taken.
    params: pattern of the names of the averaged parameters. every: number of steps between two weights.
    evaluates: False: evaluations use the weights themselves.

    Buffers are not averaged. Raises TaskError for other values.
    """

    start: int
    params: str = "*"
    every: int = 1
    evaluates: bool = True

    def __post_init__(self) -> None:
        if not _is_integer(self.start) or self.start < 1:
            raise TaskError(f"Swa: start must be an integer, at least 1, got {self.start!r}")
        _check_every(self)


@dataclass(frozen=True)
class Polyak(StepOperation):
    """Let the weights of a module follow those of another: target = (1 - tau) · target + tau · source.

    For the target networks of reinforcement learning, BYOL and DINO. Both modules have the same structure.
    Floating-point buffers follow as well; other buffers are copied. Parameters of the target must not be
    trained: `target.requires_grad_(False)`.

    source, target: names of modules. tau: above 0, at most 1. every: number of steps between two updates.
    Raises TaskError for other values.
    """

    source: str
    target: str
    tau: float = 0.005
    every: int = 1

    def __post_init__(self) -> None:
        _check_number(self, "tau", 0, 1, above=True)
        _check_every(self)


@dataclass(frozen=True)
class CopyTo(StepOperation):
    """Copy the weights and buffers of a module to another of the same structure.

    source, target: names of modules. every: number of steps between two copies. Raises TaskError for an
    `every` below 1.
    """

    source: str
    target: str
    every: int = 1

    def __post_init__(self) -> None:
        _check_every(self)


@dataclass(frozen=True)
class Clamp(StepOperation):
    """Limit each element of parameters to the range from `low` to `high`.

    params: pattern of their names. low, high: None: no limit. Raises TaskError if there is no limit or no
    number between them.
    """

    params: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise TaskError("Clamp requires low, high or both")
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                _check_number(self, name, -math.inf, math.inf)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise TaskError(f"Clamp: low={self.low} exceeds high={self.high}; swap them")


@dataclass(frozen=True)
class Normalize(StepOperation):
    """Scale parameters so that their L2 norm is `norm`. A zero vector stays zero.

    params: pattern of their names.
    dim: over which the norm is taken, such as -1 for each row of a matrix; None: of the whole parameter.
    norm: above 0. Raises TaskError for other values.
    """

    params: str
    dim: int | None = -1
    norm: float = 1.0

    def __post_init__(self) -> None:
        _check_number(self, "norm", 0, math.inf, above=True)
        if self.dim is not None and not _is_integer(self.dim):
            raise TaskError(f"Normalize: dim must be an integer or None, got {self.dim!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_every(operation: Any) -> None:
    if not _is_integer(operation.every) or operation.every < 1:
        raise TaskError(
            f"{type(operation).__name__}: every must be an integer, at least 1, got {operation.every!r}"
        )


def _check_number(
    operation: Any, name: str, low: float, high: float, above: bool = False, below: bool = False
) -> None:
    """Raise TaskError unless low ≤ value ≤ high, or < with `above` and `below`."""
    value = getattr(operation, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < low or value > high or (above and value == low) or (below and value == high):
        limits = f"{'above' if above else 'at least'} {low:g}" if math.isfinite(low) else "finite"
        if math.isfinite(high):
            limits += f" and {'below' if below else 'at most'} {high:g}"
        raise TaskError(f"{type(operation).__name__}: {name} must be {limits}, got {value!r}")

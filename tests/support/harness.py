"""Real ranks over gloo for the tests, in processes that run one function after another.

    ranks(2)(function, *args)   -> results of function(*args) by rank, each call in a new process group

`function` and its arguments must be picklable.
"""

import faulthandler
import gc
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline import Spec, Task, train
from paceline.distributed.dtensor import is_materialized
from paceline.errors import RankError
from paceline.events import Evaluated, Step
from paceline.launch import rank_pool
from paceline.plan.plan import parse
from paceline.training.init.named_tensors import named_tensors

TIMEOUT_S = 120.0


class Ranks:
    """Ranks of the process pool of Paceline, in which warnings are errors.

    A call raises AssertionError with the traceback of the rank that failed first. The pool then restarts.
    """

    def __init__(self, size: int):
        self._pool = rank_pool.Ranks(size)

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        try:
            return self._pool(_run, function, args, timeout_s, timeout_s=timeout_s)
        except RankError as error:
            raise AssertionError(str(error)) from None

    def end(self) -> None:
        self._pool.end()


ranks = cache(Ranks)


def _run(function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
    """Call the function in this rank; a rank that hangs prints its stacks before the pool ends it."""
    _make_warnings_errors()
    faulthandler.enable()  # a crash prints its stack
    faulthandler.dump_traceback_later(timeout_s - 2.0)
    try:
        return function(*args)
    except BaseException:
        raise AssertionError(traceback.format_exc()) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # DistributedDataParallel must not hold the last reference to the process group


@cache
def _make_warnings_errors() -> None:
    warnings.filterwarnings("error")
    for message, category, module in (
        (".*is deprecated", FutureWarning, "torch"),
        (".*torch.jit.* is deprecated", DeprecationWarning, ""),  # by torch itself, for zero1
        ("The .grad attribute of a Tensor", UserWarning, ""),  # Dynamo hides it from users by other means
        (".*Function.> should not be instantiated", DeprecationWarning, ""),  # by Dynamo, for tp
        (".*use of fork", DeprecationWarning, ""),  # by workers of a data loader, from Python 3.12 on
    ):
        warnings.filterwarnings("ignore", message, category, module)
    gc.freeze()


@dataclass(frozen=True)
class TrainingResult:
    """Results of a training on one rank."""

    losses: list[float]
    grad_norms: list[float | None]
    lrs: list[float]
    metrics: list[dict[str, float]]
    # Unsharded parameters and buffers after the last step, of the stages on the rank
    weights: dict[str, np.ndarray]
    notes: tuple[str, ...]
    named: dict[str, list[float]] = field(default_factory=dict)  # losses that have names


def take_sgd_step_(model: nn.Module, loss: torch.Tensor, lr: float) -> float:
    """Update the parameters by gradient descent, and return the norm of their gradient."""
    model.zero_grad()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return norm


def train_on_this_rank(
    task: Task,
    spec: Spec,
    plan: str | None = None,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TrainingResult:
    """Train on this rank, inside the context `fault()`, which may inject an error."""
    built: list[nn.Module] = []
    observed: list[nn.Module] = []
    model = type(task).model

    def keep() -> nn.Module:
        built.append(model(task))
        return built[-1]

    def observe(model: nn.Module, what: str, step: int) -> None:
        observed[:] = [model]

    object.__setattr__(task, "model", keep)
    with fault():
        events = list(train(spec, parse(plan) if plan is not None else None, task=task, observe=observe))
        trained_model = [*built, *observed][-1]  # rank 0 also builds models to compare them
        weights = {
            name: to_whole_array(tensor)
            for name, tensor in named_tensors(trained_model).items()
            if is_materialized(tensor)
        }
    steps = [event for event in events if isinstance(event, Step)]
    return TrainingResult(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        lrs=[step.lr for step in steps],
        metrics=[dict(event.metrics) for event in events if isinstance(event, Evaluated)],
        weights=weights,
        notes=events[0].notes,
        named={name: [step.losses[name] for step in steps] for name in steps[0].losses} if steps else {},
    )


def to_whole_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()


def train_on_ranks(
    size: int, task: Task, spec: Spec, plan: str | None = None, fault: Any = nullcontext
) -> TrainingResult:
    """Train on `size` ranks and return the result, which must be bit-identical on all ranks.

    With a pipeline, the weights of the result are those of all ranks.
    """
    on_ranks = ranks(size)(train_on_this_rank, task, spec, plan, fault)
    weights: dict[str, np.ndarray] = {}
    for result in on_ranks:
        weights = result.weights | weights
    first = replace(on_ranks[0], weights=weights)
    for rank, other in enumerate(on_ranks):
        expected = replace(first, weights={name: weights[name] for name in other.weights})
        assert not (names := differences(other, expected, 0.0)), (
            f"rank {rank} differs from the others: {names}"
        )
    return first


@cache
def _train_single(task: Task, spec: str) -> TrainingResult:
    return train_on_ranks(1, task, Spec.model_validate_json(spec), "single")


def differences_from_single(
    size: int, plan: str, task: Task, spec: Spec, fault: Any = nullcontext
) -> list[str]:
    """Train on `size` ranks. Return series and tensors that differ from one process by more than 1e-10."""
    return differences(
        train_on_ranks(size, task, spec, plan, fault), _train_single(task, spec.model_dump_json()), 1e-10
    )


def differences(found: TrainingResult, expected: TrainingResult, rtol: float) -> list[str]:
    """Return the series and tensors that differ by more than rtol, relative to their largest element."""
    assert found.weights.keys() == expected.weights.keys()
    assert [entry.keys() for entry in found.metrics] == [entry.keys() for entry in expected.metrics]
    assert found.named.keys() == expected.named.keys()
    pairs = {
        "losses": (found.losses, expected.losses),
        "grad_norms": (found.grad_norms, expected.grad_norms),
        "lrs": (found.lrs, expected.lrs),
        **{
            name: ([entry[name] for entry in found.metrics], [entry[name] for entry in expected.metrics])
            for name in set().union(*expected.metrics)
        },
        **{f"loss {name}": (found.named[name], expected.named[name]) for name in expected.named},
        **{name: (found.weights[name], expected.weights[name]) for name in expected.weights},
    }
    return [
        f"{name} by {error:.2g}"
        for name, (first, second) in pairs.items()
        if not (error := relative_difference(first, second)) <= rtol
    ]


def relative_difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two series, relative to the largest expected element."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    if not expected.size or np.array_equal(found, expected):
        return 0.0
    scale = np.abs(expected).max()
    return float(np.abs(found - expected).max() / scale) if scale else float("inf")

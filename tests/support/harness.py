"""Real ranks over gloo for the tests: processes that stay, and run one function after another.

    ranks(2)(function, *args)   -> what function(*args) returned on each rank, in a fresh process group

`function` and its arguments must be picklable.
"""

import faulthandler
import gc
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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
    """Live ranks: the product's own pool of processes, in which warnings are errors.

    A call raises AssertionError with the traceback of the rank that failed first; the pool then starts anew.
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
    faulthandler.dump_traceback_later(timeout_s - 2.0)
    try:
        return function(*args)
    except BaseException:
        raise AssertionError(traceback.format_exc()) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # what is left of DistributedDataParallel must not be the last to hold the group


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
    """What came of a training on one rank."""

    losses: list[float]
    grad_norms: list[float | None]
    lrs: list[float]
    metrics: list[dict[str, float]]
    weights: dict[
        str, np.ndarray
    ]  # whole, after the last step; buffers too; those of the stages that lie on the rank
    notes: tuple[str, ...]


def train_on_this_rank(
    task: Task,
    spec: Spec,
    plan: str | None = None,
    plant: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TrainingResult:
    """Train in this rank. `plant` may spoil something for as long as its context lasts."""
    built: list[nn.Module] = []
    trained_here: list[nn.Module] = []
    model = type(task).model

    def keep() -> nn.Module:
        built.append(model(task))
        return built[-1]

    def observe(model: nn.Module, what: str, step: int) -> None:
        trained_here[:] = [model]

    object.__setattr__(task, "model", keep)
    with plant():
        events = list(train(spec, parse(plan) if plan is not None else None, task=task, observe=observe))
        last = [*built, *trained_here][-1]  # rank 0 builds others to compare them
        weights = {
            name: to_whole_array(tensor)
            for name, tensor in named_tensors(last).items()
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
    )


def to_whole_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()


def train_on_ranks(
    size: int, task: Task, spec: Spec, plan: str | None = None, plant: Any = nullcontext
) -> TrainingResult:
    """Train on so many ranks, which must agree on every bit of what they share."""
    on_ranks = ranks(size)(train_on_this_rank, task, spec, plan, plant)
    weights: dict[str, np.ndarray] = {}
    for each in on_ranks:
        weights = each.weights | weights
    first = replace(on_ranks[0], weights=weights)
    for rank, other in enumerate(on_ranks):
        here = replace(first, weights={name: weights[name] for name in other.weights})
        assert not (found := differences(other, here, 0.0)), f"rank {rank} differs from the others: {found}"
    return first


@cache
def _train_single(task: Task, spec: str) -> TrainingResult:
    return train_on_ranks(1, task, Spec.model_validate_json(spec), "single")


def differences_from_single(
    size: int, plan: str, task: Task, spec: Spec, plant: Any = nullcontext
) -> list[str]:
    """Where a training on so many ranks differs from one process by more than 1e-10; [] where nowhere."""
    return differences(
        train_on_ranks(size, task, spec, plan, plant), _train_single(task, spec.model_dump_json()), 1e-10
    )


def differences(found: TrainingResult, expected: TrainingResult, rtol: float) -> list[str]:
    """Return the series and tensors that differ by more than rtol, relative to their largest element."""
    assert found.weights.keys() == expected.weights.keys()
    assert [each.keys() for each in found.metrics] == [each.keys() for each in expected.metrics]
    pairs = {
        "losses": (found.losses, expected.losses),
        "grad_norms": (found.grad_norms, expected.grad_norms),
        "lrs": (found.lrs, expected.lrs),
        **{
            name: ([each[name] for each in found.metrics], [each[name] for each in expected.metrics])
            for name in set().union(*expected.metrics)
        },
        **{name: (found.weights[name], expected.weights[name]) for name in expected.weights},
    }
    return [
        f"{name} by {by:.2g}"
        for name, (one, other) in pairs.items()
        if not (by := relative_difference(one, other)) <= rtol
    ]


def relative_difference(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest element."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    if not expected.size or np.array_equal(found, expected):
        return 0.0
    scale = np.abs(expected).max()
    return float(np.abs(found - expected).max() / scale) if scale else float("inf")

"""Why a training ends before its length: a request, `max_time`, or the metrics of its evaluations."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from paceline.errors import SpecError
from paceline.events import describe_metric
from paceline.spec import Spec, suggest

REQUESTED, TIME_IS_OVER = 2, 1  # causes of a stop; of several, the highest is reported


@dataclass(frozen=True)
class StopState:
    """The evaluations so far, as `stop.patience` counts them. Each checkpoint contains it."""

    metric: str  # such as "max accuracy"
    best: float | None = None  # value of the metric; None while it was NaN
    best_step: int = 0
    waited: int = 0  # evaluations in a row without a better value


def read_score(metrics: Mapping[str, float], metric: str, key: str) -> float:
    """Return the value of a metric such as "max accuracy", with the sign by which lower is better.

    key: of the request, which names the metric. Raises SpecError if the evaluation lacks the metric.
    """
    direction, name = metric.split()
    if name not in metrics:
        raise SpecError(f"{key}={metric!r}, but the evaluation has no {name}{suggest(name, metrics)}")
    return metrics[name] if direction == "min" else -metrics[name]


def get_metric(spec: Spec) -> tuple[str, str]:
    """Return the key that names the metric of `stop`, and the metric."""
    return (
        ("stop.metric", spec.stop.metric) if spec.stop.metric is not None else ("save.best", spec.save.best)
    )


def check_stop(spec: Spec, prefixes: Collection[str]) -> None:
    """Raise SpecError if a metric must end the training, or choose the best checkpoint, that no split has.

    prefixes: of the metrics of each evaluated split; empty for the validation split.
    """
    if spec.stop.is_active and not prefixes:
        name = "stop.patience" if spec.stop.patience is not None else "stop.target"
        value = spec.stop.patience if spec.stop.patience is not None else spec.stop.target
        raise SpecError(
            f"{name}={value:g} requires evaluations, but the task has no validation split; return samples "
            f"for dataset('validation'), or leave {name} out"
        )
    if not prefixes or "" in prefixes:
        return
    for key, metric in (("save.best", spec.save.best), get_metric(spec)):
        direction, name = metric.split()
        if not name.startswith(tuple(prefixes)):
            raise SpecError(
                f"{key}={metric!r} is a metric of the validation split, which the task does not have; use a "
                f"split of evaluate_splits, as in --set '{key}={direction} {next(iter(prefixes))}loss'"
            )


def add_evaluation(spec: Spec, state: StopState, step: int, metrics: Mapping[str, float]) -> StopState:
    """Return the state after an evaluation. Raises SpecError if it lacks the metric."""
    key, metric = get_metric(spec)
    score = read_score(metrics, metric, key)
    best = None if state.best is None else read_score({metric.split()[1]: state.best}, metric, key)
    if not math.isnan(score) and (best is None or score < best - spec.stop.min_delta):
        return StopState(metric, metrics[metric.split()[1]], step)
    return replace(state, waited=state.waited + 1)


def explain_stop(spec: Spec, state: StopState | None, metrics: Mapping[str, float]) -> str | None:
    """Return why the training ends at this step, as a sentence; None if it continues.

    metrics: of an evaluation after this step; empty if there was none.
    """
    if not spec.stop.is_active or not metrics:
        return None
    key, metric = get_metric(spec)
    score, name = read_score(metrics, metric, key), metric.split()[1]
    target = spec.stop.target
    if target is not None and score <= read_score({name: target}, metric, key):
        return f"{describe_metric(name)} {metrics[name]:.6g} reached stop.target={target:g}"
    patience = spec.stop.patience
    if patience is None or state is None or state.metric != metric or state.waited < patience:
        return None
    evaluations = f"{state.waited:,} evaluation{'s' * (state.waited != 1)}"
    best = (
        f"the best was {state.best:.6g} at step {state.best_step}" if state.best is not None else "it is NaN"
    )
    return f"{describe_metric(name)} was not better in {evaluations}; {best}"


class StopPolicy:
    """Decides whether a training ends before its length. All ranks decide the same.

    stop: whether this rank is requested to stop. deadline: the time by `time.monotonic` at which `max_time`
    is over; rank 0 alone looks at the clock. state: of the checkpoint from which the training resumes.
    """

    def __init__(
        self,
        spec: Spec,
        rank: int,
        stop: Callable[[], bool],
        deadline: float | None,
        state: StopState | None,
        metrics: Mapping[str, float],
    ):
        self.spec, self.stop = spec, stop
        self.deadline = deadline if rank == 0 else None
        self.cause = 0  # of this rank; once it is not 0, it remains so
        self.is_stopping = False  # all ranks agreed to save and stop
        metric = get_metric(spec)[1]
        is_same = state is not None and state.metric == metric
        self.state = state if state is not None and is_same else StopState(metric)
        self.why = explain_stop(spec, self.state, metrics)  # a metric ends the training

    def poll(self) -> bool:
        """Return whether this rank wants all ranks to stop."""
        if self.cause < REQUESTED and self.stop():
            self.cause = REQUESTED
        if not self.cause and self.deadline is not None and time.monotonic() >= self.deadline:
            self.cause = TIME_IS_OVER
        return self.cause > 0

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decide whether the metrics after `step` steps end the training."""
        if self.spec.stop.is_active:
            self.state = add_evaluation(self.spec, self.state, step, metrics)
            self.why = explain_stop(self.spec, self.state, metrics)

    def explain_stopping(self, ranks: int, device: torch.device) -> str:
        """Return why all ranks stop: a sentence, or "" if it was requested. A collective."""
        cause = torch.tensor(self.cause, dtype=torch.float64, device=device)
        if ranks > 1:
            dist.all_reduce(cause, dist.ReduceOp.MAX)
        return f"max_time={self.spec.max_time} is over" if int(cause) == TIME_IS_OVER else ""

    @property
    def is_over(self) -> bool:
        """Whether the training ends after this step; the same on all ranks."""
        return self.is_stopping or self.why is not None

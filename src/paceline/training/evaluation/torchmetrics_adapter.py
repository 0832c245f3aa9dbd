"""Metrics of torchmetrics as accumulators: their states are merged by the reductions that they declare."""

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.metrics import Accumulator

# By the name of the function in torchmetrics.utilities.data. A mean of means would not be exact.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": operator.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


def as_accumulator(name: str, value: Any) -> Any:
    """Return a metric of torchmetrics as an accumulator, and any other value unchanged. Raises TaskError."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return value
    if isinstance(value, torchmetrics.MetricCollection):
        raise TaskError(f"metrics() returned a MetricCollection for {name!r}; return its metrics by name")
    return TorchMetric(name, value) if isinstance(value, torchmetrics.Metric) else value


def class_name(value: Accumulator) -> str:
    """Return the name of the class that the task used."""
    return type(value.metric if isinstance(value, TorchMetric) else value).__name__


class TorchMetric(Accumulator):
    """A metric of torchmetrics (1.0 or newer), updated by the task."""

    def __init__(self, name: str, metric: Any):
        kind = type(metric).__name__
        if any(isinstance(module, sys.modules["torchmetrics"].Metric) for module in [*metric.modules()][1:]):
            raise TaskError(
                f"metrics() returned a {kind} for {name!r}, which contains other metrics, so that Paceline "
                "cannot merge it; return those metrics"
            )
        for state, reduction in metric._reductions.items():
            function = getattr(reduction, "__name__", str(reduction))
            if reduction is not None and function != "dim_zero_cat" and function not in REDUCTIONS:
                raise TaskError(
                    f"metrics() returned a {kind} for {name!r}, whose state {state!r} is reduced by "
                    f"{function}, which is not exact for parts of different sizes; write an Accumulator "
                    "(paceline.metrics)"
                )
        self.metric = metric
        self.parts: dict[str, list[Tensor]] = {
            state: [value]
            for state, reduction in metric._reductions.items()
            if reduction is None and isinstance(value := getattr(metric, state), Tensor)
        }
        self._is_returned = "_is_returned_to_paceline" in vars(metric)
        object.__setattr__(metric, "_is_returned_to_paceline", True)

    def update(self, *args: Any, **kwargs: Any) -> "TorchMetric":
        self.metric.update(*args, **kwargs)
        return self

    def merge(self, other: "TorchMetric") -> None:
        """Merge the states as torchmetrics reduces them over ranks."""
        if class_name(other) != class_name(self):
            raise TaskError(
                f"metrics() returned a {class_name(self)} and a {class_name(other)} under one name; return "
                "the same class for each batch"
            )
        for state, reduction in self.metric._reductions.items():
            mine, theirs = getattr(self.metric, state), getattr(other.metric, state)
            if state in self.parts:
                self.parts[state] += other.parts[state]
            elif reduction is None or reduction.__name__ == "dim_zero_cat":
                setattr(self.metric, state, [*_as_list(mine), *_as_list(theirs)])
            else:
                setattr(self.metric, state, REDUCTIONS[reduction.__name__](mine, theirs))
        self.metric._update_count += other.metric._update_count

    def finish(self) -> Any:
        metric = self.metric
        for state, parts in self.parts.items():
            setattr(metric, state, torch.stack(parts) if len(parts) > 1 else parts[0])
        # Only this rank computes: a metric that synchronizes would wait for the others.
        metric._to_sync = metric.sync_on_compute = False
        metric._computed = None
        return metric.compute()


def _as_list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value

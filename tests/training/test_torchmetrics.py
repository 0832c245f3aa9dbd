"""Metrics of torchmetrics are merged exactly over batches and ranks.

Where torchmetrics is not installed, a stand-in with the same attributes for states takes its place.
"""

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from harness import train_on_ranks
from paceline import Spec, World, train
from paceline.errors import TaskError
from paceline.training.evaluation.metric_totals import read_numbers
from paceline.training.evaluation.torchmetrics_adapter import as_accumulator


class Metric(nn.Module):
    """The state of a torchmetrics.Metric, and what it does on several ranks: compute() synchronizes."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}
        self._update_count = 0
        self._computed: Any = None
        self.sync_on_compute = self._to_sync = True

    def add_state(self, name: str, default: Any, dist_reduce_fx: Any) -> None:
        setattr(self, name, default)
        self._defaults[name] = default
        self._reductions[name] = dist_reduce_fx

    def compute(self) -> Any:
        assert not (self._to_sync and dist.is_initialized() and dist.get_world_size() > 1)
        return self.result()


# Named as in torchmetrics.utilities.data. Paceline does not call them.
def dim_zero_sum(states: Any) -> Any: ...


def dim_zero_mean(states: Any) -> Any: ...


def dim_zero_max(states: Any) -> Any: ...


def dim_zero_cat(states: Any) -> Any: ...


def first_state(states: Any) -> Any: ...


class MetricCollection(nn.ModuleDict):
    pass


class Many(Metric):
    """A state of each kind: sums, extrema, lists, and moments of each part that nothing reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dim_zero_sum)
        self.add_state("largest", torch.tensor(-torch.inf, dtype=torch.float64), dim_zero_max)
        self.add_state("values", [], dim_zero_cat)
        self.add_state("sizes", [], None)
        self.add_state("moments", torch.zeros(2, dtype=torch.float64), None)

    def update(self, values: Tensor) -> None:
        values = values.double()
        self._update_count += 1
        self.total = self.total + values.sum()
        self.largest = torch.maximum(self.largest, values.max())
        self.values.append(values)
        self.sizes.append(torch.tensor(len(values)))
        self.moments = torch.stack([values.sum(), values.square().sum()])

    def result(self) -> dict[str, Tensor]:
        values = torch.cat(list(self.values))
        moments = self.moments.reshape(-1, 2).sum(0)
        return {
            "total": self.total,
            "largest": self.largest,
            "median": values.median(),
            "count": torch.stack(self.sizes).sum(),
            "variance": moments[1] / len(values) - (moments[0] / len(values)) ** 2,
        }


class Reduced(Metric):
    def __init__(self, fx: Any):
        super().__init__()
        self.add_state("state", torch.zeros(()), fx)


class Nested(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Many()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    module: Any = types.ModuleType("torchmetrics")
    module.__spec__ = importlib.machinery.ModuleSpec("torchmetrics", None)
    module.Metric, module.MetricCollection = Metric, MetricCollection
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchmetrics", module)
        yield


class Measured(models.Points):
    what: str = "right"
    samples: int = 7

    def dataset(self, split: str) -> Any:
        size = 16 if split == "train" else self.samples
        return models.Pairs(x=models.random_normal(size, 5), y=models.random_normal(size, 3, seed=1))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        metric = Many()
        metric.update(batch[1].flatten())
        return {
            "right": {"many": metric},
            "mean": {"m": Reduced(dim_zero_mean)},
            "custom": {"m": Reduced(first_state)},
            "nested": {"m": Nested()},
            "collection": {"m": MetricCollection({"a": metric})},
        }[self.what]


@pytest.mark.processes
@pytest.mark.parametrize(("size", "plan", "samples"), [(1, "single", 7), (2, "ddp", 5), (2, "zero3", 2)])
def test_states_are_merged_over_batches_and_ranks(size: int, plan: str, samples: int) -> None:
    task = Measured(samples=samples)
    found = train_on_ranks(size, task, Spec(steps=1, batch=4), plan, stand_in).metrics[-1]
    values = task.dataset("validation").columns["y"].double().numpy()
    expected = {
        "total": values.sum(),
        "largest": values.max(),
        "median": np.sort(values, None)[(values.size - 1) // 2],
        "count": values.size,
        "variance": values.var(),
    }
    assert {name: found[f"many/{name}"] for name in expected} == pytest.approx(expected, rel=1e-12)


ERRORS = {
    "mean": "metrics() returned a Reduced for 'm', whose state 'state' is reduced by dim_zero_mean, which is "
    "not exact for parts of different sizes; write an Accumulator (paceline.metrics)",
    "custom": "metrics() returned a Reduced for 'm', whose state 'state' is reduced by first_state",
    "nested": "metrics() returned a Nested for 'm', which contains other metrics",
    "collection": "metrics() returned a MetricCollection for 'm'; return its metrics by name",
}


@pytest.mark.parametrize("what", ERRORS)
def test_metrics_that_cannot_be_merged_are_refused(what: str) -> None:
    with stand_in(), pytest.raises(TaskError) as caught:
        list(train(Spec(steps=1, batch=4), task=Measured(what=what), world=World()))
    assert str(caught.value).startswith(ERRORS[what])


def test_torchmetrics_itself() -> None:
    pytest.importorskip("torchmetrics")
    from torchmetrics import classification, regression

    # Probabilities: torchmetrics decides for each update whether scores are logits.
    scores = models.random_normal(23, 4).softmax(-1)
    targets = models.random_integers(4, 23, seed=1)
    kinds = [
        (lambda: classification.MulticlassF1Score(4), (scores, targets)),
        (lambda: classification.MulticlassAUROC(4), (scores, targets)),
        (lambda: classification.MulticlassAveragePrecision(4), (scores, targets)),
        (lambda: classification.MulticlassConfusionMatrix(4), (scores, targets)),
        (regression.PearsonCorrCoef, (scores[:, 0], scores[:, 0] + scores[:, 1])),
    ]
    for build, inputs in kinds:
        whole = build()
        whole.update(*inputs)
        accumulators = []
        for part in zip(*(tensor.split((9, 1, 13)) for tensor in inputs), strict=True):
            metric = build()
            metric.update(*part)
            accumulators.append(as_accumulator("m", metric))
        for other in accumulators[1:]:
            accumulators[0].merge(other)
        found, expected = (
            read_numbers("m", result) for result in (accumulators[0].finish(), whole.compute())
        )
        assert found == pytest.approx(expected, rel=1e-6)

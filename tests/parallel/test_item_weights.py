"""A task decides by `weights` whether the items of its loss have weights: for every batch, or for none."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import models
from faults import replaced
from paceline import Spec, Task
from paceline.errors import Error
from paceline.parallel.loss import forward
from paceline.spec import Optimizer
from paceline.training.step import step

pytestmark = pytest.mark.processes

SPEC = Spec(
    steps=3,
    batch=8,
    precision="fp64",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
)


class Plain(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return models.Rows(x=models.random_normal(24, 5), y=models.random_integers(3, 24))

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["y"], reduction="none")


class Weighted(Plain):
    """A task whose `weights` returns None, weights of 1, or a mixture of both."""

    which: str = "none"

    def weights(self, batch: dict[str, Tensor]) -> Tensor | None:
        match self.which:
            case "none":
                return None
            case "by rank":
                return None if dist.get_rank() else torch.ones_like(batch["y"])
            case "by sample":
                return None if batch["y"][0] == 1 else torch.ones_like(batch["y"])
        return torch.ones_like(batch["y"])


def without_reductions() -> Any:
    """Make a sum of weights over the ranks an error."""

    def patch(original: Any) -> Any:
        class Refused(original):
            def __init__(self, *arguments: Any) -> None:
                raise AssertionError("weights are summed over the ranks")

        return Refused

    return replaced(step, "GlobalWeight", patch)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(2, "ddp"), (2, "pp=2,microbatches=2"), pytest.param(4, "zero3,microbatches=2", marks=pytest.mark.slow)],
)
def test_none_is_the_same_as_no_method(ranks: int, plan: str) -> None:
    found = harness.train_on_ranks(ranks, Weighted(), SPEC, plan, without_reductions)
    assert not harness.differences(found, harness.train_on_ranks(ranks, Plain(), SPEC, plan), 0.0)
    ones = harness.train_on_ranks(ranks, Weighted(which="ones"), SPEC, plan)
    assert not harness.differences(found, ones, 1e-12)


def test_weights_are_summed_if_there_are_any() -> None:
    with pytest.raises(AssertionError, match="weights are summed over the ranks"):
        harness.train_on_ranks(2, Weighted(which="ones"), SPEC, "ddp", without_reductions)


def error_of(which: str, plan: str) -> str:
    try:
        harness.train_on_this_rank(Weighted(which=which), SPEC.model_copy(update={"steps": 12}), plan)
    except Error as error:
        return str(error)
    return ""


def test_a_mixture_over_ranks_is_refused() -> None:
    assert harness.ranks(2)(error_of, "by rank", "ddp") == [forward.MIXED_WEIGHTS] * 2


@pytest.mark.parametrize("plan", ["single", "single,microbatches=2"])
def test_a_mixture_over_batches_is_refused(plan: str) -> None:
    [message] = harness.ranks(1)(error_of, "by sample", plan)
    assert message == forward.MIXED_WEIGHTS

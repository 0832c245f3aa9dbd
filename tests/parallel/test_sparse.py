"""Tests of sparse gradients: single and ddp train as with dense gradients, other plans refuse them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from harness import relative_difference, train_on_ranks
from paceline import Spec, Task
from paceline.errors import PlanError, TaskError
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.training.model_facts.model_analysis import analyze_model, build_meta_model

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 6, sparse=sparse)
        self.embedding = nn.Embedding(30, 6, sparse=sparse)
        self.last = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Any:
        return self.last(self.bag(words) + self.embedding(words[:, 0]).tanh())


class Words(Task):
    sparse: bool = True
    optimizer_name: str = ""

    def model(self) -> nn.Module:
        return Net(self.sparse)

    def dataset(self, split: str) -> Any:
        return (
            models.Pairs(x=models.random_integers(30, 40 * 5).view(40, 5), y=models.random_normal(40, 3))
            if split == "train"
            else None
        )

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def optimizer(self, params: Any) -> Any:
        params = [parameter for _, parameter in params]
        return getattr(torch.optim, self.optimizer_name)(params, lr=0.1) if self.optimizer_name else None


def sgd(**more: Any) -> Spec:
    return Spec(
        steps=4,
        batch=8,
        precision="fp64",
        optimizer=Optimizer(name="sgd", lr=0.5, momentum=0, weight_decay=0, **more),
    )


@pytest.mark.parametrize(
    ("size", "plan"), [(1, "single"), (1, "single,microbatches=2"), (2, "ddp"), (2, "ddp,microbatches=2")]
)
def test_trains_as_with_dense_gradients(size: int, plan: str) -> None:
    for optimizer_name, clip in (("", None), ("", 0.1)):
        found = train_on_ranks(size, Words(optimizer_name=optimizer_name), sgd(clip=clip), plan)
        expected = train_on_ranks(
            1, Words(sparse=False, optimizer_name=optimizer_name), sgd(clip=clip), "single"
        )
        assert relative_difference(found.losses, expected.losses) < 1e-12
        assert relative_difference(found.grad_norms, expected.grad_norms) < 1e-12
        for name, weight in expected.weights.items():
            assert relative_difference(found.weights[name], weight) < 1e-12, (optimizer_name, clip, name)


def analyze_and_return_error(plan: str) -> str:
    with pytest.raises(PlanError) as caught:
        analyze_model(sgd(), parse(plan).resolve(2), Words(), CPU)
    return str(caught.value)


def test_other_plans_are_refused() -> None:
    for plan in ("zero1", "zero2", "zero3", "tp=2", "pp=2,microbatches=2", "local-sgd"):
        message = analyze_and_return_error(plan)
        assert message.startswith(
            f"plan {parse(plan).resolve(2)}: the gradient of bag.weight is sparse, which only single "
            "and ddp support"
        ), message


def test_optimizers_without_sparse_support() -> None:
    for task, optimizer in (
        (Words(), Optimizer()),
        (Words(), Optimizer(name="sgd", momentum=0.9, weight_decay=0)),
        (Words(), Optimizer(name="sgd", momentum=0, weight_decay=0.1)),
        (Words(optimizer_name="RMSprop"), Optimizer()),
    ):
        with pytest.raises(
            TaskError,
            match=r"the gradient of bag.weight is sparse, which \w+ does not support with its settings; use ",
        ):
            list(_run(task, optimizer))


def _run(task: Task, optimizer: Optimizer) -> Any:
    from paceline import World, train

    return train(Spec(steps=1, batch=8, optimizer=optimizer), "single", World(), task=task)


def test_find_sparse_parameters() -> None:
    from paceline.training.optimization.sparse_gradients import find_sparse_parameters

    assert list(find_sparse_parameters(build_meta_model(sgd(), Words()).model)) == [
        "bag.weight",
        "embedding.weight",
    ]
    assert not find_sparse_parameters(build_meta_model(sgd(), Words(sparse=False)).model)

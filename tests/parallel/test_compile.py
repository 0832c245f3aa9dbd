"""Tests of compiled blocks: plans train as without compilation, or are refused."""

from typing import Any

import pytest
import torch

import models
from harness import TrainingResult, differences, ranks, train_on_ranks, train_on_this_rank
from paceline import Spec, Task
from paceline.errors import PlanError
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.training.model_facts.model_analysis import validate_plan

pytestmark = pytest.mark.processes

SPEC = Spec(
    steps=2, batch=8, seed=3, precision="fp64", optimizer=Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
)
PLANS = [
    (2, "tp=2"),
    (2, "ddp"),
    (2, "zero3"),
    (2, "pp=2,microbatches=2"),
    (2, "pp=2,pp_schedule=interleaved,microbatches=2"),
    (2, "zero3,recompute=full"),
]
PLANS += [(4, "dp=2,tp=2,zero=3"), (4, "pp=2,tp=2,microbatches=2"), (2, "local-sgd,period=2")]


def train_compiled(task: Task, plan: str) -> tuple[TrainingResult, int]:
    """Return the training, and the number of compiled graphs."""
    counters: Any = torch._dynamo.utils.counters
    torch._dynamo.reset()  # other tests compile in this process too
    counters.clear()
    return train_on_this_rank(task, SPEC.model_copy(update={"compile": True}), plan), counters["stats"][
        "unique_graphs"
    ]


@pytest.mark.slow  # the C++ compiler is slow
@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_trains_as_without_compilation(size: int, plan: str) -> None:
    task = models.ShortText(depth=4)
    expected = train_on_ranks(size, task, SPEC, plan)
    for rank, (found, graphs) in enumerate(ranks(size)(train_compiled, task, plan, timeout_s=300.0)):
        assert graphs
        expected_here = TrainingResult(
            **{**vars(expected), "weights": {name: expected.weights[name] for name in found.weights}}
        )
        assert not differences(found, expected_here, 1e-10), f"rank {rank}"


@pytest.mark.parametrize(
    ("plan", "size", "sentence"),
    [
        ("cp=2", 2, "cannot be compiled yet; leave --compile or cp out"),
        ("pp=2,cp=2", 4, "cannot be compiled yet; leave --compile or cp out"),
        ("tp=2,recompute=full", 2, "cannot be compiled yet; leave --compile, recompute or tp out"),
        ("pp=2,pp_schedule=zero-bubble", 2, "use pp_schedule=1f1b or interleaved, or leave --compile out"),
        ("pp=2,pp_schedule=zbv", 2, "use pp_schedule=1f1b or interleaved, or leave --compile out"),
    ],
)
def test_plans_that_cannot_be_compiled_are_refused(plan: str, size: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        validate_plan(SPEC.model_copy(update={"compile": True}), parse(plan).resolve(size), models.Text())

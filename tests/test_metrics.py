"""The accumulators of paceline.metrics: their values, their merges and their errors."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models import random_integers, random_normal
from paceline import Evaluated, Spec, World, metrics, train
from paceline.errors import TaskError
from paceline.metrics import Accumulator, Accuracy, Perplexity, TopKAccuracy
from paceline.spec import Optimizer

KINDS = {"accuracy": Accuracy, "top 2": lambda: TopKAccuracy(2), "perplexity": Perplexity}


def values_by_loops(scores: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Return the metrics of items, computed one by one."""
    hits = top = loss = total = 0.0
    for row, target, weight in zip(scores, targets, weights, strict=True):
        if target == -100:
            continue
        order = sorted(range(len(row)), key=lambda index: -row[index])
        hits += weight * (order[0] == target)
        top += weight * (target in order[:2])
        loss += weight * (math.log(sum(math.exp(score) for score in row)) - row[target])
        total += weight
    return {"accuracy": hits / total, "top 2": top / total, "perplexity": math.exp(loss / total)}


@pytest.mark.parametrize("has_weights", [False, True])
def test_values_of_parts_equal_those_computed_one_by_one(has_weights: bool) -> None:
    scores, targets = random_normal(9, 4, 5).double(), random_integers(5, 9, 4, seed=1)
    targets[::3, 1] = -100
    weights = torch.rand(9, 4, generator=torch.Generator().manual_seed(2)).double()
    expected = values_by_loops(
        scores.reshape(-1, 5).numpy(),
        targets.flatten().numpy(),
        weights.flatten().numpy() if has_weights else np.ones(36),
    )
    assert len({*expected.values()}) == 3
    for name, kind in KINDS.items():
        for parts in ((9,), (4, 5), (1, 6, 2), (8, 1)):
            accumulators = [
                kind().update(*part)
                for part in zip(
                    scores.split(parts),
                    targets.split(parts),
                    weights.split(parts) if has_weights else [None] * len(parts),
                    strict=True,
                )
            ]
            for other in accumulators[1:]:
                accumulators[0].merge(other)
            assert accumulators[0].finish() == pytest.approx(expected[name], rel=1e-13)


def test_values_without_items_and_out_of_range() -> None:
    ignored = torch.full((3,), -100)
    for kind in KINDS.values():
        assert math.isnan(kind().finish())
        assert math.isnan(kind().update(torch.randn(3, 4), ignored).finish())
    wrong = torch.tensor([[0.0, 1e4]])
    assert Perplexity().update(wrong, torch.tensor([0])).finish() == math.inf
    # An item that has no weight does not count, even if its loss is infinite.
    scores = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    found = Perplexity().update(scores, torch.tensor([1, 0]), torch.tensor([0.0, 1.0]))
    assert found.finish() == pytest.approx(2.0)
    with torch.autocast("cpu", torch.bfloat16):
        close = Perplexity().update(torch.tensor([[1.0, 1.001]]), torch.tensor([0]))
    assert close.finish() == pytest.approx(1 + math.exp(0.001), rel=1e-6)


SCORES, TARGETS = torch.zeros(4, 3), torch.tensor([0, 2, 1, 0])
ERRORS = {
    "classes first": (
        lambda: Accuracy().update(SCORES.T, TARGETS),
        r"Accuracy: scores must have the shape of the targets and a last dimension of classes, "
        r"\(4, classes\), got \(3, 4\)",
    ),
    "one score": (lambda: Accuracy().update(SCORES[:, 0], TARGETS), r"\(4, classes\), got \(4,\)"),
    "one hot": (
        lambda: Accuracy().update(SCORES, SCORES),
        "targets must be indices .* as integers, got float32",
    ),
    "bool": (lambda: Perplexity().update(SCORES, TARGETS > 0), "as integers, got bool"),
    "a list": (lambda: Perplexity().update(SCORES, [0, 2, 1, 0]), "targets must be a tensor, got list"),
    "no class": (
        lambda: Perplexity().update(SCORES, TARGETS + 1),
        "Perplexity: target 3 is not a class from 0 to 2; items with the target ignore_index=-100 do not",
    ),
    "negative": (lambda: Accuracy().update(SCORES, TARGETS - 1), "target -1 is not a class from 0 to 2"),
    "weights": (
        lambda: TopKAccuracy(1).update(SCORES, TARGETS, torch.ones(3)),
        r"weights must have the shape of the targets, \(4,\), got \(3,\)",
    ),
    "k of 0": (lambda: TopKAccuracy(0), "TopKAccuracy: k must be an integer, at least 1, got 0"),
    "k of 5": (lambda: TopKAccuracy(5).update(SCORES, TARGETS), "k=5 exceeds the number of classes, 3"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what: str) -> None:
    function, message = ERRORS[what]
    with pytest.raises(TaskError, match=message):
        function()


@pytest.mark.parametrize("shared", [[], {}, torch.zeros(())], ids=["list", "dict", "tensor"])
def test_state_that_accumulators_would_share_is_refused(shared: object) -> None:
    with pytest.raises(TaskError, match=r"Shared.state is a \w+ of the class"):
        type("Shared", (Accumulator,), {"state": shared})


def test_names() -> None:
    assert {*metrics.__all__} == {
        "Accumulator",
        "Accuracy",
        "MeanAveragePrecision",
        "MultilabelF1",
        "Perplexity",
        "TopKAccuracy",
    }
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__.split("\n")[0].endswith(".")


def test_example_in_the_docstring() -> None:
    lines = (Accumulator.__doc__ or "").split("\n\n    `Task.metrics`")[0].splitlines()[2:]
    namespace: dict[str, type] = {"Accumulator": Accumulator}
    exec("\n".join(line[8:] for line in lines), namespace)
    output: Tensor = torch.tensor([1.0, 1.0, -1.0, -1.0])
    target = torch.tensor([True, False, True, False])
    first, second = (namespace["F1"]().update(output[part], target[part]) for part in (slice(3), slice(3, 4)))
    first.merge(second)
    assert float(first.finish()) == 0.5


def test_example_of_the_page(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/tasks.md").read_text()
    [program] = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "F1" in code]
    (tmp_path / "sign.py").write_text(program)
    spec = Spec(task=f"{tmp_path / 'sign.py'}:Sign", batch=50, epochs=8, optimizer=Optimizer(lr=0.05))
    [*_, last] = [event for event in train(spec, world=World()) if isinstance(event, Evaluated)]
    assert 0.5 < last.metrics["f1"] < last.metrics["accuracy"] <= 1

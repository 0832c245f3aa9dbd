"""Accumulators of a task are exact under every plan, for uneven splits and over a resume."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

import models
from command import TASK, paceline, write_task
from harness import ranks, relative_difference, train_on_ranks
from paceline import RunFolder, Spec, World, train
from paceline.errors import TaskError
from paceline.events import Evaluated
from paceline.metrics import Accumulator, Accuracy, Perplexity, TopKAccuracy
from paceline.spec import Optimizer, Save
from paceline.tasks.text import Gpt
from paceline.training.evaluation import metric_totals
from runs import NEVER, make_spec, train_run

CLASSES = 256  # of the model; the tokens are below 6
pytestmark = pytest.mark.processes


class F1(Accumulator):
    """Macro F1 of all tokens: counts by class."""

    def __init__(self, classes: int):
        self.hits = self.found = self.right = torch.zeros(classes)

    def update(self, scores: Tensor, targets: Tensor) -> Self:
        size = len(self.hits)
        found = scores.argmax(-1)
        self.hits = self.hits + torch.bincount(targets[found == targets], minlength=size)
        self.found = self.found + torch.bincount(found.flatten(), minlength=size)
        self.right = self.right + torch.bincount(targets.flatten(), minlength=size)
        return self

    def merge(self, other: Self) -> None:
        self.hits = self.hits + other.hits
        self.found = self.found + other.found
        self.right = self.right + other.right

    def finish(self) -> dict[str, Any]:
        by_class = 2 * self.hits / (self.found + self.right).clamp(min=1)
        return {"macro": by_class.double().mean(), "class": by_class[:2]}


class Median(Accumulator):
    """A metric that needs all values: the median of the losses. Its class is local to a function."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def update(self, losses: Tensor) -> Self:
        self.losses.append(losses.flatten())
        return self

    def merge(self, other: Self) -> None:
        self.losses += other.losses

    def finish(self) -> Tensor:
        return torch.cat(self.losses).sort().values[7]


class Scored(models.Text):
    """A GPT with metrics of all kinds. Ranks have different numbers of samples, also none."""

    samples: int = 7

    def model(self) -> Gpt:
        return Gpt(width=8, depth=2, heads=2, context=8)

    def dataset(self, split: str) -> Any:
        size = 16 if split == "train" else self.samples
        lengths = 1 + torch.arange(size) * 5 % 8
        return models.Rows(
            tokens=models.random_integers(6, size, 9, seed=len(split)),
            mask=torch.arange(8) < lengths[:, None],
        )

    def inputs(self, batch: Any) -> Tensor:
        return batch["tokens"][:, :-1]

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        class LocalMedian(Median):
            pass

        targets, losses = batch["tokens"][:, 1:], self.loss(output, batch)
        return {
            "accuracy": Accuracy().update(output, targets, batch["mask"]),
            "hits": output.argmax(-1) == targets,
            "top3": TopKAccuracy(3).update(output, targets.masked_fill(~batch["mask"], -100)),
            "perplexity": Perplexity().update(output, targets),
            "f1": F1(CLASSES).update(output, targets),
            "median": LocalMedian().update(losses),
        }


def expected_metrics(task: Scored, weights: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the metrics of a plain model with these weights on the whole split, by loops over the tokens."""
    model = task.model().double()
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=False)
    columns = task.dataset("validation").columns
    with torch.no_grad():
        logits = model(columns["tokens"][:, :-1])
    pairs, total, kept = np.zeros((CLASSES, CLASSES)), [], []
    for row, tokens, mask in zip(logits, columns["tokens"][:, 1:], columns["mask"], strict=True):
        for scores, target, is_kept in zip(row.numpy(), tokens.tolist(), mask.tolist(), strict=True):
            rank = int((scores > scores[target]).sum())
            pairs[target, scores.argmax()] += 1
            total.append(np.log(np.exp(scores).sum()) - scores[target])
            kept += [rank] * is_kept
    hits, sums = np.diag(pairs), pairs.sum(0) + pairs.sum(1)
    by_class = (2 * hits / np.maximum(sums, 1)).astype(np.float32)
    return {
        "accuracy": np.mean(np.array(kept) == 0),
        "hits": np.mean(np.array(kept) == 0),  # weighted by the mask
        "top3": np.mean(np.array(kept) < 3),
        "perplexity": np.exp(np.mean(total)),
        "f1/macro": by_class.astype(np.float64).mean(),
        "f1/class/0": by_class[0],
        "f1/class/1": by_class[1],
        "median": sorted(total)[7],
    }


SPEC = Spec(steps=3, batch=4, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.5))
PLANS = [
    (1, "single", 7),
    (2, "zero1", 1),
    (2, "zero3", 3),
    (2, "pp=2,microbatches=2", 7),
    (2, "tp=2", 5),
    (2, "cp=2", 7),
]
SLOW_PLANS = [
    (2, "ddp", 7),
    (4, "ddp", 2),
    (2, "zero2", 7),
    (2, "local-sgd,period=2", 7),
    (2, "pp=2,microbatches=2,pp_schedule=zbv", 7),
    (4, "hsdp", 5),
    (4, "zero3,tp=2", 7),
    (4, "pp=2,dp=2,microbatches=2", 7),
    (4, "tp=2,pp=2,microbatches=2", 7),
    (4, "zero3,dp=2,cp=2", 9),
]


@pytest.mark.parametrize(
    ("size", "plan", "samples"),
    [*PLANS, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_PLANS]],
)
def test_accumulators_equal_those_of_the_whole_split(size: int, plan: str, samples: int) -> None:
    task = Scored(samples=samples)
    found = train_on_ranks(size, task, SPEC, plan)  # also requires equal metrics on all ranks
    assert not wrong_metrics(found.metrics[-1], expected_metrics(task, found.weights))


def wrong_metrics(found: dict[str, float], expected: dict[str, float]) -> set[str]:
    assert {*found} == {"loss", *expected}
    assert 0 < expected["perplexity"] < CLASSES
    return {name for name in expected if not relative_difference(found[name], expected[name]) < 1e-10}


@contextlib.contextmanager
def counting_samples_of_others() -> Iterator[None]:
    """Count the sample that stands in for those of a rank without samples."""
    add = metric_totals.AccumulatedMetrics.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metric_totals.AccumulatedMetrics,
            "add",
            lambda self, name, value, is_counted: add(self, name, value, True),
        )
        yield


@contextlib.contextmanager
def losing_ranks() -> Iterator[None]:
    """Finish the accumulators of the first rank alone."""
    finish_all = metric_totals.AccumulatedMetrics._finish_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metric_totals.AccumulatedMetrics, "_finish_all", lambda self, states: finish_all(self, states[:1])
        )
        yield


@pytest.mark.parametrize("fault", [counting_samples_of_others, losing_ranks])
def test_planted_faults_are_found(fault: Any) -> None:
    task = Scored(samples=5)  # the last batch has one sample for two ranks
    found = train_on_ranks(2, task, SPEC, "ddp", fault)
    assert {"perplexity", "f1/macro"} <= wrong_metrics(
        found.metrics[-1], expected_metrics(task, found.weights)
    )


SOURCE = (
    TASK.replace("import torch\n", "import torch\nfrom paceline.metrics import Accumulator\n", 1)
    + """
    def metrics(self, output, batch):
        return {"r2": R2().update(output, batch[1])}


class R2(Accumulator):
    count = 0.0
    residual = total = square = 0.0

    def update(self, output, target):
        self.count += target.numel()
        self.residual += (output - target).square().sum().item()
        self.total += target.sum().item()
        self.square += target.square().sum().item()
        return self

    def merge(self, other):
        for name in ("count", "residual", "total", "square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def finish(self):
        return 1 - self.residual / (self.square - self.total**2 / self.count)
"""
)


def test_best_checkpoint_of_an_accumulator_survives_a_resume(tmp_path: Path) -> None:
    """The accumulators start anew at each evaluation, and the best score is kept over a stop."""
    task = write_task(tmp_path, SOURCE)
    save = Save(minutes=NEVER, keep=1, best="max r2")
    spec = make_spec(task, steps=21, save=save, validation=17).model_copy(update={"evaluate_every": 3})
    runs = []
    for name, stops in (("undisturbed", [None]), ("stopped", [16, None])):
        events = [event for stop in stops for event in train_run(2, spec, "zero2", tmp_path / name, stop)]
        runs.append({event.step: event.metrics["r2"] for event in events if isinstance(event, Evaluated)})
    assert runs[0] == runs[1]
    assert [*runs[0]] == [*range(3, 22, 3)]
    best = max(runs[0], key=runs[0].__getitem__)
    kept = [RunFolder(tmp_path / name).checkpoints() for name in ("undisturbed", "stopped")]
    assert kept == [sorted({best, 21})] * 2


class Kept(models.Points):
    """A task whose metrics cannot be combined."""

    what: str
    kept: list[Any] = dataclasses.field(default_factory=list)

    def dataset(self, split: str) -> Any:
        return super().dataset("train")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        score = Score().update(self.what, len(batch[0]))
        if self.what == "kept":
            self.kept.append(score)
            score = self.kept[0]
        elif self.what == "two kinds" and len(batch[0]) < 10:
            score = F1(3)
        elif self.what in ("none", "sometimes") and len(batch[0]) < 10:
            score = None if self.what == "none" else torch.ones(len(batch[0]))
        names = {"loss": "loss", "clash": "score/a"}
        return {
            "score": score,
            **({names[self.what]: Score().update("", 1)} if self.what in names else {}),
        }


class Score(Accumulator):
    def update(self, what: str, size: int) -> Self:
        self.what, self.size = what, size
        self.state = (lambda: 1) if what == "lambda" else None
        return self

    def merge(self, other: Self) -> None:
        if self.what == "merge":
            raise ZeroDivisionError("nothing to merge")

    def finish(self) -> Any:
        return {
            "finish": lambda: 1 / 0,
            "clash": lambda: {"a": 1.0},
            "text": lambda: {"a": "good"},
            "complex": lambda: torch.tensor(1j),
            "large": lambda: torch.zeros(101, 100),
        }.get(self.what, lambda: True)()


WRONG = {
    "kept": "metrics() returned the same Score object for 'score' again, which still has the samples of an "
    "earlier batch; create a new metric in each call of metrics()",
    "two kinds": "metrics() returned a Score and a F1 for 'score'; return the same class for each batch",
    "none": "metrics() must return tensors or accumulators, got NoneType for 'score'; update() of an "
    "accumulator must return self",
    "sometimes": "metrics() returned an accumulator for 'score' only in some batches",
    "loss": "metrics() returned an accumulator named 'loss', which is the loss; rename it",
    "merge": "merge() of metric 'score' raised ZeroDivisionError: nothing to merge (",
    "finish": "finish() of metric 'score' raised ZeroDivisionError: division by zero (",
    "clash": "metrics() returned two metrics named 'score/a'; rename one of them",
    "text": "finish() of metric 'score/a' must return a number, a tensor or a dict of these, got str",
    "complex": "finish() of metric 'score' must return real numbers, got complex64",
    "large": "finish() of metric 'score' returned 10,100 numbers; return at least 1 and at most 10,000",
}
ON_RANKS = {"lambda": "sending the state of metric 'score' to another rank raised "}


def end_of_training(what: str) -> str:
    spec = Spec(steps=1, batch=5 if what == "kept" else 10)
    try:
        list(train(spec, task=Kept(what=what), world=World() if "RANK" not in os.environ else None))
    except TaskError as error:
        return str(error)
    return "ended"


def test_metrics_that_cannot_be_combined_are_refused() -> None:
    for what, message in WRONG.items():
        assert end_of_training(what).startswith(message), what
    assert end_of_training("right") == end_of_training("lambda") == "ended"


def test_every_rank_reports_an_error_of_the_rank_that_finishes() -> None:
    for what in ("finish", "lambda"):
        reports = ranks(2)(end_of_training, what)
        assert all(report.startswith((WRONG | ON_RANKS)[what]) for report in reports), reports
        assert "test_metric_totals.py, line" in reports[1] or what == "lambda"


def test_an_accumulator_that_is_kept_over_evaluations_is_refused() -> None:
    """Each evaluation has one batch, so that it is returned once in each of them."""
    spec = Spec(steps=2, batch=models.SAMPLES, evaluate_every=1)
    with pytest.raises(TaskError, match="returned the same Score object for 'score' again"):
        list(train(spec, task=Kept(what="kept"), world=World()))


def test_the_command_prints_one_sentence(tmp_path: Path) -> None:
    source = SOURCE.replace("return 1 - self", "return 1 / 0 - self")
    write_task(tmp_path, source)
    words = "train my.py:Regression --set validation=9 --set norm=false --batch 8 --steps 1 --ranks 2"
    result = paceline(*words.split(), at=tmp_path)
    line = next(at for at, text in enumerate(source.splitlines(), 1) if "1 / 0" in text)
    assert (result.status, result.err) == (
        2,
        "paceline: finish() of metric 'r2' raised ZeroDivisionError: division by zero "
        f"(my.py, line {line})\n",
    )

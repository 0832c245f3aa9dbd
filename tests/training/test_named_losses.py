"""Several losses by name: the training equals a plain loop on whole batches, and each loss is reported."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import drawing
import harness
import models
from command import events_of_kind, succeed
from faults import replaced
from harness import TrainingResult, differences, relative_difference, take_sgd_step_, train_on_ranks
from paceline import Spec, Task, World, train
from paceline.after_step import Ema
from paceline.data.order import shuffle
from paceline.errors import Error
from paceline.events import Evaluated, Event, Step
from paceline.parallel.loss import named_losses
from paceline.parallel.loss.named_losses import NamedLossSums
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save
from paceline.training.init.deferred_init import fill_, record
from paceline.training.step import step_metrics

pytestmark = pytest.mark.processes

VALIDATION = 11
SPEC = Spec(
    steps=5,  # cross the end of an epoch
    batch=8,
    seed=5,
    precision="fp64",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    evaluate_every=100,  # at the end
    save=Save(minutes=1e9),
)


class Points(models.Points):
    """Losses with three items by sample, with one, and with one for the whole batch."""

    with_scalar: bool = False

    def dataset(self, split: str) -> models.Pairs:
        count, seed = (models.SAMPLES, 0) if split == "train" else (VALIDATION, 7)
        return models.Pairs(
            x=models.random_normal(count, 5, seed=seed), y=models.random_normal(count, 3, seed=seed + 1)
        )

    def loss(self, output: Tensor, batch: Any) -> Any:
        losses = {"error": (output - batch[1]).square(), "size": output.abs().sum(-1)}
        return losses | ({"drift": output.exp().mean()} if self.with_scalar else {})

    def loss_weights(self) -> dict[str, float]:
        return {"size": 0.3} | ({"drift": -0.2} if self.with_scalar else {})

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"sign": output[:, 0] > 0}


class Text(models.Text):
    """Losses of masked tokens, whose number differs between ranks and micro-batches."""

    with_scalar: bool = False

    def model(self) -> nn.Module:
        model = models.Gpt()
        for block in model.blocks:
            block.mlp = nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Linear(14, 6))  # tp=2 divides 14
        return model

    def dataset(self, split: str) -> models.Rows:
        count, seed = (models.SAMPLES, 0) if split == "train" else (VALIDATION, 7)
        mask = torch.arange(8) < (torch.arange(count) * 5 % 9)[:, None]
        return models.Rows(tokens=models.random_integers(11, count, 9, seed=seed), mask=mask)

    def loss(self, output: Tensor, batch: Any) -> Any:
        size, mask = output.logsumexp(-1).square(), batch["mask"]
        mean = (size * mask).sum() / mask.sum().clamp(min=1)
        return {"tokens": super().loss(output, batch), "size": mean if self.with_scalar else size}

    def loss_weights(self) -> dict[str, float]:
        return {"size": 0.05}


def losses_of_points(task: Any, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the reported means of a whole batch."""
    output = model(batch["x"])
    means = {
        "error": ((output - batch["y"]) ** 2).sum() / (3 * len(output)),
        "size": output.abs().sum() / len(output),
    }
    loss = means["error"] + 0.3 * means["size"]
    if task.with_scalar:
        means["drift"] = output.exp().mean()
        loss = loss - 0.2 * means["drift"]
    return loss, means


def losses_of_text(task: Any, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    output, targets = model(batch["tokens"][:, :-1])[batch["mask"]], batch["tokens"][:, 1:][batch["mask"]]
    means = {"tokens": F.cross_entropy(output, targets), "size": output.logsumexp(-1).square().mean()}
    return means["tokens"] + 0.05 * means["size"], means


BY_HAND: dict[type[Task], Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    Points: losses_of_points,
    Text: losses_of_text,
}


@cache
def train_plainly(task: Any) -> TrainingResult:
    """Return what a plain loop over whole batches computes."""
    model, weights, _ = record(task.model, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()
    by_hand = BY_HAND[type(task)]

    def read(split: str, indices: Any) -> dict[str, Tensor]:
        columns = {name: column[indices] for name, column in task.dataset(split).columns.items()}
        return {name: x.double() if x.is_floating_point() else x for name, x in columns.items()}

    losses, norms = [], []
    named: dict[str, list[float]] = {}
    for indices in shuffle(np.arange(40), models.SAMPLES, SPEC.seed).reshape(5, 8).tolist():
        loss, means = by_hand(task, model, read("train", indices))
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
        for name, mean in means.items():
            named.setdefault(name, []).append(mean.item())
    with torch.no_grad():
        batch = read("validation", list(range(VALIDATION)))
        loss, means = by_hand(task, model, batch)
        metrics = {"loss": loss.item()} | {name: mean.item() for name, mean in means.items()}
        if "x" in batch:
            metrics["sign"] = (model(batch["x"])[:, 0] > 0).double().mean().item()
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return TrainingResult(losses, norms, [0.1] * 5, [metrics], final, (), named)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "plan", "task"),
    [
        (1, "single,microbatches=2", Points(with_scalar=True)),
        (2, "ddp", Points()),
        (2, "zero3,microbatches=2", Text()),
        (2, "pp=2,microbatches=2", Points(with_scalar=True)),
        (2, "tp=2", Text()),
        (2, "cp=2", Text()),
        (3, "ddp,uneven=1", Points()),
        slow(1, "single", Text(with_scalar=True)),
        slow(2, "ddp,microbatches=4", Text()),
        slow(2, "zero1", Points(with_scalar=True)),
        slow(2, "zero2", Text()),
        slow(2, "pp=2,microbatches=2", Text()),
        slow(3, "zero3,uneven=1,microbatches=2", Points(with_scalar=True)),
        slow(4, "hsdp", Points()),
        slow(4, "zero3", Text()),
        slow(4, "ddp,microbatches=2", Points()),
        slow(4, "dp=2,pp=2,microbatches=4", Text()),
        slow(4, "dp=2,tp=2,zero=3", Text()),
        slow(4, "dp=2,cp=2,microbatches=2", Text()),
        slow(4, "pp=4,microbatches=2", Text()),
    ],
)
def test_training_equals_a_plain_loop(ranks: int, plan: str, task: Task) -> None:
    assert not differences(train_on_ranks(ranks, task, SPEC, plan), train_plainly(task), 1e-10)


# Negative controls: faults that the comparison finds


def without_loss_weights() -> Any:
    return replaced(named_losses, "read_factors", lambda _: lambda task: {})


def with_the_last_micro_batch_only() -> Any:
    def patch(add: Any) -> Any:
        def add_last(self: NamedLossSums, named: Any, weights: Any) -> None:
            self.begin()
            add(self, named, weights)

        return add_last

    return replaced(NamedLossSums, "add", patch)


def without_other_ranks() -> Any:
    """Report the losses of this rank, times the number of ranks."""
    return replaced(
        step_metrics,
        "_metrics_of_pass",
        lambda original: lambda row, *rest: original([*row[:3], *(value / 2 for value in row[3:])], *rest),
    )


@pytest.mark.parametrize(
    ("fault", "task", "found"),
    [
        (without_loss_weights, Points(), "losses"),
        (with_the_last_micro_batch_only, Points(), "loss error"),
        (without_other_ranks, Points(), "loss size"),
    ],
)
def test_faults_are_found(fault: Any, task: Task, found: str) -> None:
    result = train_on_ranks(2, task, SPEC, "ddp,microbatches=2", fault)
    lines = differences(result, train_plainly(task), 1e-10)
    assert any(line.startswith(found) for line in lines), lines


# Other engines and parts of a task


def train_with_servers(task: Task) -> list[tuple[float, dict[str, float]]]:
    plan = parse("parameter-server,servers=1,staleness=0")
    return [
        (event.loss, dict(event.losses)) for event in train(SPEC, plan, task=task) if isinstance(event, Step)
    ]


@pytest.mark.parametrize("task", [Points(), slow(Text())])
def test_parameter_server(task: Task) -> None:
    found, expected = harness.ranks(3)(train_with_servers, task)[0], train_plainly(task)
    assert relative_difference([loss for loss, _ in found], expected.losses) <= 1e-10
    for name, series in expected.named.items():
        assert relative_difference([losses[name] for _, losses in found], series) <= 1e-10


@pytest.mark.parametrize("task", [Points(), slow(Points(with_scalar=True))])
def test_local_sgd(task: Task) -> None:
    """With period 1 the mean of the weights is one step on the mean of the gradients."""
    found, expected = train_on_ranks(2, task, SPEC, "local-sgd,period=1"), train_plainly(task)
    norms = expected.grad_norms  # of local SGD: the mean over ranks
    assert not differences(replace(found, grad_norms=norms, notes=()), expected, 1e-10)


class Vae(drawing.Vae):
    """Named losses that draw random numbers."""

    def loss(self, output: Tensor, batch: Any, rng: Any) -> Any:
        mean, log_var = output.chunk(2, -1)
        kl = mean.square() + log_var.exp() - 1 - log_var
        return {"items": super().loss(output, batch, rng), "kl": kl}

    def loss_weights(self) -> dict[str, float]:
        return {"kl": 0.5}


@pytest.mark.parametrize(("ranks", "plan"), [(2, "zero2,microbatches=2"), slow(2, "pp=2,microbatches=2")])
def test_draws_by_sample(ranks: int, plan: str) -> None:
    assert not harness.differences_from_single(ranks, plan, Vae(), SPEC)


class Averaged(Points):
    def after_step(self) -> Any:
        return [Ema(0.9)]


def train_run(run: Path, plan: str, stop_at: int | None) -> list[Event]:
    calls = iter(range(10**9))

    def stop() -> bool:
        return stop_at is not None and next(calls) >= stop_at - 1

    spec = SPEC.model_copy(update={"steps": 9})
    return list(train(spec, parse(plan), task=Averaged(), run=RunFolder(run), stop=stop))


def reported(events: list[Event]) -> dict[Any, Any]:
    """Return what the steps and evaluations report."""
    steps = {event.step: (event.loss, dict(event.losses)) for event in events if isinstance(event, Step)}
    metrics = [dict(event.metrics) for event in events if isinstance(event, Evaluated)]
    return steps | ({"metrics": metrics[-1]} if metrics else {})


def test_resumed_training_reports_the_same(tmp_path: Path) -> None:
    plan = "zero3,microbatches=2"
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole, first, second = (
        reported(harness.ranks(2)(train_run, tmp_path / name, plan, stop_at)[0])
        for name, stop_at in (("whole", None), ("stopped", 4), ("stopped", None))
    )
    assert first.keys() & {9} == set()
    assert {*second} >= {9, "metrics"}
    assert 1 not in second
    assert first | second == whole


# Losses that are refused

calls: list[int] = []


class Odd(Points):
    """A task that returns losses that cannot be added or reported."""

    what: str = "right"

    def loss(self, output: Tensor, batch: Any) -> Any:
        losses = super().loss(output, batch)
        calls.append(1)
        match self.what:
            case "empty":
                return {}
            case "list":
                return losses | {"more": [1.0]}
            case "integer":
                return losses | {"more": output.argmax(-1)}
            case "reserved":
                return losses | {"lr": output}
            case "number":
                return losses | {1: output}
            case "shape":
                return losses | {"more": output.flatten()[:-1]}
            case "no items":
                return losses | {"more": output[:0]}
            case "tensor":
                return losses["error"]
            case "detached":
                return {name: loss.detach() for name, loss in losses.items()}
            case "rank":
                return losses | ({"more": output} if dist.get_rank() else {})
            case "mixes":
                return losses | {"more": output @ output.T}
        return losses

    def loss_weights(self) -> Any:
        match self.what:
            case "unknown":
                return {"eror": 1.0}
            case "text":
                return {"size": "0.3"}
            case "nan":
                return {"size": float("nan")}
            case "pairs":
                return [("size", 0.3)]
            case "raises":
                raise ValueError("no weights")
        return super().loss_weights() if self.what != "empty" else {}

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"size": output[:, 0]} if self.what == "metric" else {}


REFUSED = {
    "right": "",
    "empty": "loss() returned an empty dict; return at least one loss",
    "list": "loss() must return a dict of tensors, got list for 'more'",
    "integer": "loss() must return real floating-point tensors, got int64 for 'more'",
    "reserved": "loss() returned a loss named 'lr', under which each step reports another value; rename it",
    "number": "loss() must return a dict with names as keys, got 1",
    "shape": "loss() returned 11 values of 'more' for a batch of 4 samples; return one or more for each",
    "no items": "loss() returned 0 values of 'more' for a batch of 4 samples",
    "tensor": "Odd defines loss_weights(), but loss() returned one tensor; return a dict of losses by name",
    "detached": "loss() returned a tensor that does not require grad",
    "rank": "loss() returned 'more' only in some batches; return the same names in all",
    "mixes": "loss() mixes the samples of a batch",
    "unknown": "loss_weights() has 'eror', which loss() does not return; it returns error, size",
    "text": "loss_weights() must return finite numbers, got str for 'size'",
    "nan": "loss_weights() must return finite numbers, got nan for 'size'",
    "pairs": "loss_weights() must return a dict of numbers, got list",
    "raises": "no weights",
    "metric": "loss() and metrics() both return 'size'; rename one of them",
}


def error_of(task: Task, plan: str) -> str:
    try:
        harness.train_on_this_rank(task, SPEC.model_copy(update={"steps": 2}), plan)
    except Error as error:
        return str(error)
    return ""


def errors_of(whats: list[str]) -> list[str]:
    return [error_of(Odd(what=what), "ddp") for what in whats]


def test_odd_losses_are_refused() -> None:
    for found in harness.ranks(2)(errors_of, [*REFUSED]):
        for message, expected in zip(found, REFUSED.values(), strict=True):
            assert expected in message if expected else not message, (message, expected)


class Changing(Points):
    """A task whose names change: in the second step, or in the validation."""

    where: str = "training"

    def loss(self, output: Tensor, batch: Any) -> Any:
        calls.append(1)
        losses = super().loss(output, batch)
        if self.where == "training":
            return losses | ({"more": output} if len(calls) > 1 else {})
        return losses | ({"auxiliary": output.square()} if torch.is_grad_enabled() else {})

    def loss_weights(self) -> Any:
        return {"auxiliary": 0.5} if self.where == "validation" else {}


def test_names_may_change_only_in_an_evaluation() -> None:
    calls.clear()
    message = error_of(Changing(), "single")
    assert "loss() returned 'more' only in some batches; return the same names in all" in message
    found = train_on_ranks(1, Changing(where="validation"), SPEC, "single")
    assert {*found.named} == {"error", "size", "auxiliary"}
    assert {*found.metrics[0]} == {"loss", "error", "size", "sign"}


class OtherShape(Text):
    def loss(self, output: Tensor, batch: Any) -> Any:
        return super().loss(output, batch) | {"size": output.square()}


def test_losses_have_the_shape_of_the_weights() -> None:
    message = error_of(OtherShape(), "single")
    assert "loss() returned 'size' of shape (8, 8, 11), and weights() the shape (8, 8)" in message


# The program of the page


def read_program() -> str:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "class Locate" in code
    ]
    return program


def test_program_of_the_page_learns(tmp_path: Path) -> None:
    (tmp_path / "locate.py").write_text(read_program())
    task = f"{tmp_path / 'locate.py'}:Locate"
    spec = Spec(task=task, batch=50, epochs=5, optimizer=Optimizer(lr=3e-2), threads=1)
    events = list(train(spec, world=World()))
    first, *_, last = (event for event in events if isinstance(event, Step))
    for name in ("inside", "distance"):
        assert last.losses[name] < 0.5 * first.losses[name]
    assert last.loss == pytest.approx(last.losses["inside"] + 0.2 * last.losses["distance"], rel=1e-5)
    assert [*next(event for event in events if isinstance(event, Evaluated)).metrics] == [
        *("loss", "inside", "distance")
    ]


def test_commands_print_each_loss(tmp_path: Path) -> None:
    (tmp_path / "locate.py").write_text(read_program())
    words = ("train", "locate.py", "--batch", "50", "--steps", "6", "--run-dir", "run", "--ranks", "1")
    printed = succeed(*words, "--set", "save.best=min distance", at=tmp_path).out
    step = events_of_kind(tmp_path / "run", Step)[-1]
    assert step.losses.keys() == {"inside", "distance"}
    replayed = succeed("replay", "run", "--step", "6", at=tmp_path).out
    shown = succeed("show", "run", at=tmp_path).out
    for name, value in step.losses.items():
        assert f"loss {name}: {value:.4f}"[:-1] in replayed, replayed
        assert f"{name} {value:.4f}" in shown
    assert "validation distance" in printed


@pytest.mark.slow
def test_other_commands_on_the_program_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "locate.py").write_text(read_program())
    words = ("locate.py", "--batch", "40", "--ranks", "2")
    succeed("verify", *words, "--plan", "zero3,microbatches=2", "--steps", "2", at=tmp_path)
    assert "all-reduce" in succeed("comms", *words, "--plan", "ddp", at=tmp_path).out
    for command in ("plan", "preflight"):
        succeed(command, *words, at=tmp_path)
    succeed("train", *words, "--epochs", "2", "--plan", "pp=2,microbatches=2", "--run-dir", "r", at=tmp_path)
    assert events_of_kind(tmp_path / "r", Step)[-1].losses.keys() == {"inside", "distance"}

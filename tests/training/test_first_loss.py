"""Checks of the first loss: its form, and whether it mixes the samples of a batch."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import models
from command import TASK, paceline, write_task
from harness import ranks
from paceline import Error, Plan, Spec, Task, World, train
from paceline.errors import PlanError, TaskError
from paceline.events import Evaluated, Started, Step, dumps, loads
from paceline.plan.plan import parse
from paceline.report.progress import watch
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save

pytestmark = pytest.mark.processes

CLASSES, LENGTH = 5, 6
Loss = Callable[[Any, Any], Tensor]


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor


class Net(nn.Module):
    """A model with dropout and BatchNorm. `own`: the loss that the model computes."""

    def __init__(self, own: str, norm: bool):
        super().__init__()
        self.own = own
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.3)
        )
        self.last = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, tokens: Tensor, labels: Tensor) -> Any:
        out = self.last(self.body(x))
        if self.own == "tokens":  # as Hugging Face models do, -100 is padding
            logits = out[:, None, :].expand(-1, LENGTH, -1)
            return Output(logits, F.cross_entropy(logits.reshape(-1, CLASSES), tokens.flatten()))
        if self.own == "samples":
            return {"logits": out, "loss": F.cross_entropy(out, labels)}
        if self.own == "clip":
            unit = F.normalize(out, dim=-1)
            return {"similarity": self.scale * unit @ unit.T}
        if self.own == "views":
            return torch.cat([out, 2 * out.sin()])
        if self.own == "time":
            return out[None].expand(LENGTH, -1, -1) * torch.arange(1.0, LENGTH + 1)[:, None, None]
        return (out, self.scale) if self.own == "scale" else out


def cross(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[2], reduction="none")


def contrastive(output: Tensor, batch: Any) -> Tensor:
    similar = F.normalize(output, dim=-1) @ F.normalize(output.roll(1, -1), dim=-1).T
    return F.cross_entropy(similar, torch.arange(len(output)), reduction="none")


def barlow(output: Tensor, batch: Any) -> Tensor:
    first, second = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in (output, output.sin()))
    return (first.T @ second / len(output) - torch.eye(CLASSES)).square().sum()


def nt_xent(output: Tensor, batch: Any) -> Tensor:
    unit = F.normalize(output, dim=-1)
    count = len(output) // 2
    similar = (unit @ unit.T / 0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(similar, torch.arange(2 * count).roll(count))


def clip(output: Any, batch: Any) -> Tensor:
    similar = output["similarity"]
    labels = torch.arange(len(similar))
    return (F.cross_entropy(similar, labels) + F.cross_entropy(similar.T, labels)) / 2


def token_mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output[:, None].expand(-1, LENGTH, -1).reshape(-1, CLASSES), batch[1].flatten())


def triplet(output: Tensor, batch: Any) -> Tensor:
    first, second = output.chunk(2)
    return (first - second).square().sum(-1)


MIXING: dict[str, tuple[Loss, str]] = {
    "contrastive by item": (contrastive, ""),
    "contrastive": (lambda output, batch: contrastive(output, batch).mean(), ""),
    "Barlow Twins": (barlow, ""),
    "NT-Xent of two views": (nt_xent, "views"),
    "CLIP": (clip, "clip"),
    "variance of the batch": (lambda output, batch: output.var(0).sum(), ""),
    "normalized by the batch": (lambda output, batch: (output - output.mean(0)).square().mean(-1), ""),
    "detached normalization": (
        lambda output, batch: cross(output, batch) / cross(output, batch).mean().detach(),
        "",
    ),
    "mean over tokens": (token_mean, ""),
    "the model's own, of padded tokens": (lambda output, batch: output.loss, "tokens"),
    "the hardest sample": (lambda output, batch: cross(output, batch).max(), ""),
    "ranks of pairs": (lambda output, batch: F.softplus(output[:, None, 0] - output[None, :, 0]).mean(), ""),
    "sum in place of mean": (lambda output, batch: cross(output, batch).sum(), ""),
    "whole by root": (lambda output, batch: cross(output, batch).square().mean().sqrt(), ""),
    "entropy of the mean": (
        lambda output, batch: cross(output, batch) - F.softmax(output, -1).mean(0).log().mean(),
        "",
    ),
}
APART: dict[str, tuple[Loss, str]] = {
    "by item": (cross, ""),
    "mean": (lambda output, batch: F.cross_entropy(output, batch[2]), ""),
    "by element": (lambda output, batch: (output - batch[0].mean(-1, keepdim=True)).square(), ""),
    "by token": (lambda output, batch: (output[:, None] - batch[1][..., None]).square().mean(-1), ""),
    "by token, flat": (
        lambda output, batch: (output[:, None] - batch[1][..., None]).square().mean(-1).flatten(),
        "",
    ),
    "the model's own": (lambda output, batch: output["loss"], "samples"),
    "with a number of the model": (
        lambda output, batch: cross(output[0], batch) * output[1] + output[1].square(),
        "scale",
    ),
    "dropout in the loss": (lambda output, batch: cross(F.dropout(output, 0.5), batch).mean(), ""),
    "triplets in blocks": (triplet, "views"),
    "time first": (lambda output, batch: (output - batch[2][None, :, None]).square().mean((0, 2)), "time"),
    "time first, by token": (
        lambda output, batch: (output - batch[2][None, :, None]).square().mean(-1),
        "time",
    ),
    "penalty of weights": (
        lambda output, batch: F.cross_entropy(output, batch[2], label_smoothing=0.1, weight=None),
        "",
    ),
    "in place": (lambda output, batch: output.mul(2).sub_(1).square(), ""),
    "near nothing": (lambda output, batch: (output * 1e-12).square(), ""),
    "float32 inside": (lambda output, batch: F.cross_entropy(output.float(), batch[2], reduction="none"), ""),
}


class Mixed(Task):
    loss_name: str = "by item"
    weigh: bool = False
    norm: bool = True

    def model(self) -> nn.Module:
        return Net((MIXING | APART)[self.loss_name][1], self.norm)

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        draw = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, CLASSES, (48, LENGTH), generator=draw)
        tokens[torch.arange(LENGTH)[None] >= torch.randint(1, LENGTH + 1, (48, 1), generator=draw)] = -100
        return models.Pairs(
            x=torch.randn(48, 4, generator=draw),
            tokens=tokens,
            y=torch.randint(0, CLASSES, (48,), generator=draw),
        )

    def inputs(self, batch: Any) -> Any:
        return tuple(batch)

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (MIXING | APART)[self.loss_name][0](output, batch)


def error_of(name: str, plan: str, **more: Any) -> str:
    """Return the error that ends a training of two steps; "" if there is none."""
    spec = Spec(steps=2, batch=16, **more)
    try:
        for _ in train(spec, plan, World() if "RANK" not in os.environ else None, task=Mixed(loss_name=name)):
            pass
    except TaskError as error:
        return str(error)
    return ""


def test_losses_that_mix_samples_are_refused() -> None:
    missed = [
        name
        for name in MIXING
        if not error_of(name, "single,microbatches=2").startswith("loss() mixes the samples of a batch: ")
    ]
    assert not missed


@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp64", marks=pytest.mark.slow)])
def test_losses_that_do_not_mix_samples_are_accepted(precision: str) -> None:
    alarms = {
        name: message
        for name in APART
        if (message := error_of(name, "single,microbatches=2", precision=precision))
    }
    assert not alarms


def test_mixing_losses_are_accepted_on_whole_batches_or_if_allowed() -> None:
    assert [error_of(name, "single") for name in MIXING] == [""] * len(MIXING)
    assert error_of("contrastive", "single,microbatches=2", allow_local_loss=True) == ""


def on_ranks(cases: list[tuple[str, str]]) -> list[str]:
    return [error_of(name, plan) for name, plan in cases]


def test_mixing_losses_on_two_ranks() -> None:
    """All ranks raise the error, also if a sharded model must run again."""
    mixing = [
        ("contrastive", "ddp"),
        ("the model's own, of padded tokens", "zero3"),
        ("CLIP", "ddp"),
        ("Barlow Twins", "zero2"),
    ]
    separate = [
        ("by item", "ddp"),
        ("the model's own", "zero3"),
        ("triplets in blocks", "ddp"),
        ("dropout in the loss", "zero1"),
    ]
    for found in ranks(2)(on_ranks, mixing + separate):
        assert all(message.startswith("loss() mixes") for message in found[: len(mixing)]), found
        assert found[len(mixing) :] == [""] * len(separate), found
        assert "plan ddp" in found[0] or "plan dp=2" in found[0]
        assert "--allow-local-loss" in found[0]
        assert "global_loss(output, batch)" in found[0]


def the_same(name: str, allow: bool) -> list[float]:
    spec = Spec(steps=4, batch=16, allow_local_loss=allow)
    return [
        event.loss
        for event in train(spec, "single,microbatches=2", World(), task=Mixed(loss_name=name))
        if isinstance(event, Step)
    ]


@pytest.mark.slow
def test_mixing_losses_on_workers_of_a_parameter_server(tmp_path: Path) -> None:
    """Each worker checks its part. Its error is reported instead of the loss of the worker."""
    source = TASK.replace(
        "def loss(self, output, batch):\n        return (output",
        "def loss(self, output, batch):\n        return (output - output.mean(0)",
    )
    assert source != TASK
    write_task(tmp_path, source)
    words = (
        "train",
        "my.py:Regression",
        "--set",
        "norm=false",
        "--batch",
        "24",
        "--steps",
        "4",
        "--ranks",
        "3",
        "--device",
        "cpu",
    )
    result = paceline(*words, "--plan", "parameter-server,servers=1", "--run-dir", "r", at=tmp_path)
    assert result.status == 2, result.all
    assert "loss() mixes the samples of a batch" in result.err
    assert "--allow-local-loss" in result.err


def test_check_does_not_change_the_training() -> None:
    """Dropout, BatchNorm and losses are the same with the check, also if the model runs again for it."""
    for name in ("by item", "the model's own", "dropout in the loss"):
        assert the_same(name, False) == the_same(name, True), name


class Odd(Task):
    """A task that returns invalid values."""

    what: str = "right"

    def model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def dataset(self, split: str) -> Any:
        return models.Pairs(x=models.random_normal(40, 2), y=models.random_integers(3, 40))

    def loss(self, output: Any, batch: Any) -> Any:
        loss = F.cross_entropy(output, batch[1], reduction="none")
        return {
            "three": loss[:3],
            "empty": loss[:0],
            "complex": loss.to(torch.complex64),
            "integers": loss.long(),
            "detached": loss.detach(),
            "list": [loss],
            "none": None,
            "mean": loss.mean(),
        }.get(self.what, loss)

    def metrics(self, output: Any, batch: Any) -> Any:
        hit = output.argmax(-1) == batch[1]
        return {
            "scalar metric": {"f1": hit.float().mean()},
            "three metrics": {"hit": hit[:3]},
            "complex metric": {"hit": hit.to(torch.complex64)},
            "no metrics": None,
            "a list": [hit],
            "a number": {"hit": 3.0},
        }.get(self.what, {"hit": hit, "all": torch.stack([hit, hit], 1)})

    def optimizer(self, params: Any) -> Any:
        params = [parameter for _, parameter in params]
        return {
            "foreign": lambda: torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1),
            "copies": lambda: torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in params], lr=0.1),
            "lbfgs": lambda: torch.optim.LBFGS(params),
            "own": lambda: torch.optim.SGD(params, lr=0.1),
            "some": lambda: torch.optim.SGD(params[:1], lr=0.1),
            "groups": lambda: torch.optim.SGD(
                [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}], lr=0.1, momentum=0.9
            ),
            "named": lambda: torch.optim.AdamW(
                [{"params": [p], "lr": 0.1 / at, "name": f"w{at}"} for at, p in enumerate(params, 1)]
            ),
            "equal": lambda: torch.optim.SGD(
                [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}], lr=0.1
            ),
            "a class": lambda: torch.optim.SGD,
        }.get(self.what, lambda: None)()


WRONG = {
    "three": "loss() returned 3 values of the loss for a batch of 40 samples; "
    "return one or more for each sample",
    "empty": "loss() returned 0 values of the loss for a batch of 40 samples",
    "complex": "loss() must return a real floating-point tensor, got complex64",
    "integers": "loss() must return a real floating-point tensor, got int64",
    "detached": "loss() returned a tensor that does not require grad",
    "list": "loss() must return a tensor, got list",
    "none": "loss() must return a tensor, got NoneType",
    "scalar metric": "metrics() returned one number for 'f1', which would differ between the batches of "
    "ranks; return a value for each sample",
    "three metrics": "metrics() returned 3 values of 'hit' for a batch of 40 samples",
    "complex metric": "metrics() must return real tensors, got complex64 for 'hit'",
    "no metrics": "metrics() must return a dict of tensors, got NoneType",
    "a list": "metrics() must return a dict of tensors, got list",
    "a number": "metrics() must return tensors or accumulators, got float for 'hit'",
    "foreign": "optimizer() trains 2 tensors that are not parameters of the model; build it from the (name, "
    "parameter) pairs",
    "copies": "optimizer() trains 2 tensors that are not parameters of the model",
    "lbfgs": "optimizer() returned LBFGS, whose step computes the loss again through a closure",
    "a class": "optimizer() must return a torch optimizer or None, got type",
}


def test_invalid_return_values_are_refused() -> None:
    for what, message in WRONG.items():
        with pytest.raises(TaskError) as caught:
            list(train(Spec(steps=2, batch=40), "single", World(), task=Odd(what=what)))
        assert str(caught.value).startswith(message), what
    for what in ("right", "mean", "own", "some"):
        events = list(train(Spec(steps=2, batch=40), "single", World(), task=Odd(what=what)))
        assert any(isinstance(event, Evaluated) for event in events)


def test_learning_rate_without_effect_is_reported() -> None:
    def notes(what: str, **optimizer: Any) -> str:
        spec = Spec(steps=1, batch=40, optimizer=Optimizer(**optimizer))
        first = next(
            event
            for event in train(spec, "single", World(), task=Odd(what=what))
            if isinstance(event, Started)
        )
        return "; ".join(first.notes)

    assert "optimizer.lr=0.5 has no effect, because the task's optimizer() returns its own SGD" in notes(
        "own", lr=0.5
    )
    assert "optimizer.name" in notes("own", name="sgd")
    assert "no effect" not in notes("own") + notes("right", lr=0.5) + notes("own", clip=1.0)


def test_learning_rate_names_its_parameter_group(tmp_path: Path) -> None:
    def run_task(what: str) -> tuple[list[str], str, list[float]]:
        spec, console = Spec(steps=2, batch=40), Console(file=io.StringIO(), width=300)
        happened = list(train(spec, "single", World(), task=Odd(what=what)))
        run = RunFolder(tmp_path / what)
        run.path.mkdir()
        watch(iter([loads(dumps(event)) for event in happened]), run, console)
        lines = run.log.read_text().splitlines()
        notes = "\n".join(
            event for started in happened if isinstance(started, Started) for event in started.notes
        )
        return (
            [line for line in lines if " grad norm " in line],
            notes,
            [event.lr for event in happened if isinstance(event, Step)],
        )

    for what, group, note in (
        (
            "groups",
            "group 0 of 2",
            "the parameter groups have different learning rates: group 0 0.1, group 1 0.01; lr is of group 0",
        ),
        (
            "named",
            "group w1",
            "the parameter groups have different learning rates: w1 0.1, w2 0.05; lr is of w1",
        ),
    ):
        lines, notes, lrs = run_task(what)
        assert lines
        assert all(f"lr {lr:.3g} ({group})" in line for line, lr in zip(lines, lrs, strict=False)), lines
        assert note in notes
    for what in ("own", "equal", "right"):
        lines, notes, _ = run_task(what)
        assert lines
        assert not any("group" in text for text in (*lines, notes))


def test_plan_as_text() -> None:
    def plan_of(plan: Any) -> str:
        return next(
            event.plan
            for event in train(Spec(steps=1, batch=40), plan, World(), task=Odd())
            if isinstance(event, Started)
        )

    assert plan_of("single,microbatches=2") == str(parse("single,microbatches=2"))
    assert plan_of(Plan(dp=1)) == plan_of("single")
    for plan in ("zerro3", "single,mikro=2", 3, ["ddp"]):
        with pytest.raises(PlanError):
            plan_of(plan)
    assert issubclass(PlanError, Error)


SOURCE = """
import torch
from torch import nn
from paceline import Task


class Small(Task):
    rate: float = 0.0

    def model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 3))

    def dataset(self, split):
        return [(torch.ones(4) * i, torch.ones(3)) for i in range(16)] if split == "train" else None

    def loss(self, output, batch):
        return (output - batch[1]).square()
"""


def test_resume_reports_changes(tmp_path: Any) -> None:
    def notes(source: str, steps: int, **more: Any) -> str:
        place = tmp_path / f"at{steps}"
        place.mkdir(exist_ok=True)
        file = place / f"small{steps}.py"
        file.write_text(source)
        spec = Spec(task=f"{file}:Small", batch=8, steps=steps, save=Save(minutes=float("inf")), **more)
        first, *_ = [event for event in train(spec, "single", World(), run=run) if isinstance(event, Started)]
        return "; ".join(first.notes)

    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    first = "this training differs"
    assert first not in notes(SOURCE, 1)
    assert first not in notes(SOURCE, 2), "the same in another file"
    assert "from step 2 on: the code of loss() changed" in notes(SOURCE.replace(".square()", ".abs()"), 3)
    assert (
        "modules of the model was 1 Dropout, 2 Linear, 1 Sequential, 1 Tanh, is 1 Dropout, 2 Linear, 1 "
        "ReLU, 1 Sequential" in notes(SOURCE.replace(".square()", ".abs()").replace("Tanh", "ReLU"), 4)
    )
    now = SOURCE.replace(".square()", ".abs()").replace("Tanh", "ReLU").replace("0.1", "0.2")
    assert "the settings of the modules of the model changed" in notes(now, 5)
    assert "precision was 'fp32', is 'bf16'" in notes(now, 6, precision="bf16")
    assert "optimizer.lr was 0.001, is 0.5" in notes(now, 7, precision="bf16", optimizer=Optimizer(lr=0.5))
    assert "field rate was 0.0, is 0.5" in notes(now, 8, set={"rate": 0.5})

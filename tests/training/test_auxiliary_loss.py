"""An auxiliary loss of sums over the global batch equals that of a plain loop, under every plan."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import models
from command import events_of_kind, succeed
from faults import replaced
from harness import TrainingResult, differences, take_sgd_step_, train_on_ranks
from paceline import Spec, Task, World, train
from paceline.data.order import shuffle
from paceline.errors import Error
from paceline.events import Evaluated, Event, Step
from paceline.parallel.loss.auxiliary_loss import AuxiliaryLoss, check_auxiliary_loss
from paceline.parallel.loss.batch_sums import SumsOfParts
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save
from paceline.training.init.deferred_init import fill_, record
from paceline.training.step.step import TrainingStep

pytestmark = pytest.mark.processes

EXPERTS, VALIDATION = 4, 11
SPEC = Spec(
    steps=4,
    batch=8,
    seed=5,
    precision="fp64",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    evaluate_every=100,  # at the end
    save=Save(minutes=1e9),
)


class MixtureBlock(models.Block):
    """A block with experts. It adds the logits of its router to those of the blocks before it."""

    def __init__(self, width: int):
        super().__init__(width)
        self.mlp = nn.Sequential(nn.Linear(width, 14), nn.GELU(), nn.Linear(14, width))  # tp=2 divides 14
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.Linear(width, EXPERTS * width)

    def forward(self, x: Tensor, routers: Tensor) -> Any:
        x = super().forward(x)
        logits = self.router(x)
        shares = logits.softmax(-1)
        best = F.one_hot(shares.topk(2).indices, EXPERTS).sum(-2)
        outputs = self.experts(x).unflatten(-1, (EXPERTS, -1))
        return x + ((shares * best)[..., None] * outputs).sum(-2), torch.cat([routers, logits], -1)


class Mixture(models.Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MixtureBlock(6) for _ in range(3)])

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens)
        routers = x[..., :0]
        for block in self.blocks:
            x, routers = block(x, routers)
        return {"logits": self.output(self.norm(x)), "routers": routers}


class Balanced(models.Text):
    """Masked targets, whose number differs between ranks, and two auxiliary losses of all tokens."""

    def model(self) -> nn.Module:
        return Mixture()

    def dataset(self, split: str) -> models.Rows:
        count, seed = (models.SAMPLES, 0) if split == "train" else (VALIDATION, 7)
        mask = torch.arange(8) < (torch.arange(count) * 5 % 9)[:, None]
        return models.Rows(tokens=models.random_integers(11, count, 9, seed=seed), mask=mask)

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output["logits"], batch)

    def batch_sums(self, output: Any, batch: Any) -> Mapping[str, Tensor]:
        routers = output["routers"].unflatten(-1, (-1, EXPERTS)).flatten(0, 2)
        best = F.one_hot(routers.topk(2).indices, EXPERTS)
        return {
            "chosen": best.sum((0, 1)),
            "probabilities": routers.softmax(-1).sum(0),
            "tokens": torch.tensor(len(routers)),
            "logits": output["logits"].sum((0, 1)),
        }

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> Any:
        shares = sums["chosen"] / sums["tokens"] * sums["probabilities"] / sums["tokens"]
        return {"balance": EXPERTS * shares.sum(), "mean": (sums["logits"] / sums["tokens"]).square().sum()}

    def loss_weights(self) -> dict[str, float]:
        return {"balance": 0.3}


def losses_by_hand(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a whole batch, and its auxiliary losses."""
    output = model(batch["tokens"][:, :-1])
    logits, targets = output["logits"][batch["mask"]], batch["tokens"][:, 1:][batch["mask"]]
    tokens = 3 * batch["tokens"][:, 1:].numel()  # of all layers
    balance = torch.zeros((), dtype=torch.float64)
    layers = output["routers"].split(EXPERTS, -1)
    for expert in range(EXPERTS):
        chosen = sum(int((layer.topk(2).indices == expert).sum()) for layer in layers)
        probability = torch.stack([layer.softmax(-1)[..., expert].sum() for layer in layers]).sum()
        balance = balance + EXPERTS * (chosen / tokens) * (probability / tokens)
    mean = (output["logits"].flatten(0, 1) / tokens).sum(0).square().sum()
    return F.cross_entropy(logits, targets) + 0.3 * balance + mean, {"balance": balance, "mean": mean}


@cache
def train_plainly() -> TrainingResult:
    """Return what a plain loop over whole batches computes."""
    task = Balanced()
    model, weights, _ = record(task.model, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()
    losses, norms = [], []
    named: dict[str, list[float]] = {"balance": [], "mean": []}
    columns = task.dataset("train").columns
    for indices in shuffle(np.arange(32), models.SAMPLES, SPEC.seed).reshape(4, 8).tolist():
        loss, means = losses_by_hand(model, {name: column[indices] for name, column in columns.items()})
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
        for name, mean in means.items():
            named[name].append(mean.item())
    with torch.no_grad():  # the auxiliary losses of an evaluation are those of the whole split
        loss, means = losses_by_hand(model, task.dataset("validation").columns)
        metrics = {"loss": loss.item()} | {name: mean.item() for name, mean in means.items()}
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return TrainingResult(losses, norms, [0.1] * 4, [metrics], final, (), named)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (1, "single,microbatches=2"),
        (2, "ddp"),
        (2, "zero3,microbatches=2"),
        (2, "pp=2,microbatches=2,pp_schedule=gpipe"),
        slow(2, "tp=2"),
        slow(2, "cp=2"),
        slow(1, "single"),
        slow(2, "ddp,microbatches=4"),
        slow(2, "zero1"),
        slow(2, "zero2,microbatches=2"),
        slow(2, "pp=2,microbatches=1"),
        slow(3, "ddp,uneven=1"),
        slow(3, "zero3,uneven=1,microbatches=2"),
        slow(4, "hsdp"),
        slow(4, "dp=2,pp=2,microbatches=2,pp_schedule=gpipe"),
        slow(4, "dp=2,pp=2,zero=3,microbatches=1"),
        slow(4, "dp=2,tp=2,zero=3"),
        slow(4, "dp=2,cp=2,microbatches=2"),
        slow(4, "tp=2,pp=2,microbatches=2,pp_schedule=gpipe"),
    ],
)
def test_training_equals_a_plain_loop(ranks: int, plan: str) -> None:
    assert not differences(train_on_ranks(ranks, Balanced(), SPEC, plan), train_plainly(), 1e-10)


# Negative controls: faults that the comparison finds


def without_data_ranks() -> Any:
    """Start with the gradient of the sums without the factor by which engines divide."""

    def patch(begin: Any) -> Any:
        def begin_divided(self: AuxiliaryLoss, microbatches: int, start: float, checks: bool) -> None:
            begin(self, microbatches, start / self.data_ranks, checks)

        return begin_divided

    return replaced(AuxiliaryLoss, "begin", patch)


def with_sums_of_this_rank() -> Any:
    return replaced(
        SumsOfParts,
        "reduce",
        lambda _: lambda self, device, group: {name: 2 * value for name, value in self.whole().items()},
    )


def with_the_last_micro_batch_only() -> Any:
    def patch(add: Any) -> Any:
        def add_last(self: SumsOfParts, sums: Any, is_counted: bool = True) -> None:
            self.sums = {}
            self.dtypes = {}
            add(self, {name: 2 * value for name, value in sums.items()}, is_counted)

        return add_last

    return replaced(SumsOfParts, "add", patch)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (without_data_ranks, "grad_norms"),
        (with_sums_of_this_rank, "loss balance"),
        (with_the_last_micro_batch_only, "loss mean"),
    ],
)
def test_faults_are_found(fault: Any, found: str) -> None:
    class_of_result = train_on_ranks_unlike(2, "ddp,microbatches=2", fault)
    lines = differences(class_of_result, train_plainly(), 1e-10)
    assert any(line.startswith(found) for line in lines), lines


def train_on_ranks_unlike(ranks: int, plan: str, fault: Any) -> TrainingResult:
    """Train with a fault, after which ranks may differ, and return the result of the first rank."""
    return harness.ranks(ranks)(harness.train_on_this_rank, Balanced(), SPEC, plan, fault)[0]


# Parts of a training


def train_run(run: Path, plan: str, stop_at: int | None) -> list[Event]:
    calls = iter(range(10**9))

    def stop() -> bool:
        return stop_at is not None and next(calls) >= stop_at - 1

    spec = SPEC.model_copy(update={"steps": 7})
    return list(train(spec, parse(plan), task=Balanced(), run=RunFolder(run), stop=stop))


def reported(events: list[Event]) -> dict[Any, Any]:
    """Return what the steps and evaluations report."""
    steps = {event.step: (event.loss, dict(event.losses)) for event in events if isinstance(event, Step)}
    metrics = [dict(event.metrics) for event in events if isinstance(event, Evaluated)]
    return steps | ({"metrics": metrics[-1]} if metrics else {})


@pytest.mark.slow
def test_resumed_training_reports_the_same(tmp_path: Path) -> None:
    plan = "zero3,microbatches=2"
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole, first, second = (
        reported(harness.ranks(2)(train_run, tmp_path / name, plan, stop_at)[0])
        for name, stop_at in (("whole", None), ("stopped", 3), ("stopped", None))
    )
    assert 7 not in first
    assert 1 not in second
    assert first | second == whole


class Dropping(Balanced):
    """Dropout before the experts, a name of an unnamed loss, and random draws in the sums."""

    def model(self) -> nn.Module:
        model = Mixture()
        model.tokens = nn.Sequential(model.tokens, nn.Dropout(0.2))
        return model

    def batch_sums(self, output: Any, batch: Any, rng: Any) -> Any:
        noise = rng.randn(1)[..., None]
        return super().batch_sums(output, batch) | {"noise": (output["routers"] * noise).sum((0, 1))}

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> Tensor:
        return 0.3 * super().auxiliary_loss(sums)["balance"] + (sums["noise"] / 200).square().sum()

    def loss_weights(self) -> dict[str, float]:
        return {"auxiliary": 0.5}


@contextlib.contextmanager
def with_other_draws_in_each_pass() -> Iterator[None]:
    with replaced(TrainingStep, "_begin_microbatch", lambda _: lambda self, step, microbatch: None):
        yield


def error_of(task: Task, plan: str, fault: Any = contextlib.nullcontext) -> str:
    try:
        harness.train_on_this_rank(task, SPEC.model_copy(update={"steps": 2}), plan, fault)
    except Error as error:
        return str(error)
    return ""


def test_both_passes_have_the_same_dropout() -> None:
    plan = "single,microbatches=2"
    assert error_of(Dropping(), plan) == ""
    message = error_of(Dropping(), plan, with_other_draws_in_each_pass)
    assert "when the model repeats a micro-batch, which auxiliary_loss() requires" in message


@pytest.mark.slow
def test_draws_by_sample() -> None:
    assert not harness.differences_from_single(2, "zero2,microbatches=2", Drawing(), SPEC)


class Drawing(Dropping):
    def model(self) -> nn.Module:
        return Mixture()


class Stacked(Balanced):
    """The first dim of the routers counts the layers, as many as there are samples in a micro-batch."""

    def model(self) -> nn.Module:
        return StackedMixture()

    def batch_sums(self, output: Any, batch: Any) -> Any:
        return super().batch_sums(output | {"routers": output["routers"].flatten(0, 1)}, batch)


class StackedMixture(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(MixtureBlock(6))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        output = super().forward(tokens)
        return output | {"routers": torch.stack(output["routers"].split(EXPERTS, -1))}


class Forgetful(Balanced):
    """Auxiliary outputs in training only."""

    def model(self) -> nn.Module:
        return ForgetfulMixture()

    def batch_sums(self, output: Any, batch: Any) -> Any:
        return super().batch_sums(output, batch) if "routers" in output else {}


class ForgetfulMixture(Mixture):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        output = super().forward(tokens)
        return output if self.training else {"logits": output["logits"]}


# What is refused


class Odd(Balanced):
    """A task whose sums or auxiliary losses are wrong."""

    what: str = "right"

    def batch_sums(self, output: Any, batch: Any) -> Any:
        sums = dict(super().batch_sums(output, batch))
        routers = output["routers"]
        match self.what:
            case "sums are a list":
                return [*sums.values()]
            case "sum is a number":
                return sums | {"more": 1.0}
            case "sum has no name":
                return sums | {1: sums["logits"]}
            case "sum is complex":
                return sums | {"more": sums["logits"] * 1j}
            case "no sums":
                return {}
            case "mean":
                return (
                    sums
                    | {"logits": output["logits"].mean((0, 1)) * sums["tokens"]}
                    | {"probabilities": routers.softmax(-1).mean((0, 1)).unflatten(0, (3, -1)).sum(0)}
                )
            case "by sample":
                return sums | {"more": routers.sum((1, 2))}
            case "by rank":
                return sums | ({"more": routers.sum()} if dist.get_rank() else {})
            case "detached sums":
                return {name: value.detach() for name, value in sums.items()}
            case "raises in sums":
                raise ValueError("no sums today")
        return sums

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> Any:
        losses = super().auxiliary_loss(sums)
        match self.what:
            case "empty":
                return {}
            case "number":
                return 1.0
            case "named number":
                return losses | {"more": 1.0}
            case "shape":
                return losses | {"more": sums["logits"]}
            case "detached":
                return {name: value.detach() for name, value in losses.items()}
            case "reserved":
                return losses | {"grad_norm": losses["mean"]}
            case "raises":
                raise ValueError("no loss today")
        return losses

    def loss(self, output: Any, batch: Any) -> Any:
        loss = super().loss(output, batch)
        return {"mean": loss} if self.what == "same name" else loss

    def loss_weights(self) -> dict[str, float]:
        return {"balanse": 0.3} if self.what == "unknown weight" else super().loss_weights()


REFUSED = {
    "right": "",
    "sums are a list": "batch_sums() must return a dict of tensors, got list",
    "sum is a number": "batch_sums() must return a dict of tensors, got float for 'more'",
    "sum has no name": "batch_sums() must return a dict with names as keys, got 1",
    "sum is complex": "batch_sums() must return real tensors, got complex128 for 'more'",
    "no sums": "batch_sums() returned an empty dict; return at least one sum",
    "mean": "batch_sums() does not add up: the sum of 'probabilities' over a batch is not that over the",
    "by sample": "batch_sums() does not add up: the sum of 'more' over a batch is not that over the parts",
    "by rank": "batch_sums() returned 'chosen' of shape (4,), ",
    "detached sums": "batch_sums() returned no tensor through which auxiliary_loss() depends on the trained",
    "raises in sums": "batch_sums() raised ValueError: no sums today",
    "empty": "auxiliary_loss() returned an empty dict; return at least one loss",
    "number": "auxiliary_loss() must return one number as a tensor, got float",
    "named number": "auxiliary_loss() must return one number for 'more' as a tensor, got float",
    "shape": "auxiliary_loss() must return one number for 'more', got a tensor of shape (11,)",
    "detached": "auxiliary_loss() returned a number that does not depend on the sums; compute it from them",
    "reserved": "auxiliary_loss() returned a loss named 'grad_norm', under which each step reports another",
    "raises": "auxiliary_loss() raised ValueError: no loss today",
    "same name": "loss() and auxiliary_loss() both return 'mean'; rename one of them",
    "unknown weight": "loss_weights() has 'balanse', which neither loss() nor auxiliary_loss() returns; they",
}


def errors_of(tasks: list[Task], plan: str) -> list[str]:
    return [error_of(task, plan) for task in tasks]


def test_what_is_no_auxiliary_loss_is_refused() -> None:
    tasks = [*(Odd(what=what) for what in REFUSED), Stacked(), Forgetful()]
    for found in harness.ranks(2)(errors_of, tasks, "ddp"):
        for message, expected in zip(found, [*REFUSED.values(), "", ""], strict=True):
            assert expected in message if expected else not message, (message, expected)


@pytest.mark.parametrize(
    ("plan", "ranks", "reason"),
    [
        ("pp=2,microbatches=2", 2, "use pp_schedule=gpipe or microbatches=1"),
        ("pp=2,microbatches=4,pp_schedule=zero-bubble", 2, "use pp_schedule=gpipe or microbatches=1"),
        ("local-sgd,period=2", 2, "its ranks update their weights separately; use single, ddp"),
        ("parameter-server,servers=1", 2, "its ranks update their weights separately; use single, ddp"),
        ("pp=2,microbatches=2,pp_schedule=gpipe", 2, ""),
        ("pp=2,microbatches=1", 2, ""),
        ("zero3,microbatches=2", 2, ""),
    ],
)
def test_plans_that_are_refused(plan: str, ranks: int, reason: str) -> None:
    message = ""
    try:
        check_auxiliary_loss(Balanced(), parse(plan).resolve(ranks))
    except Error as error:
        message = str(error)
    assert reason in message if reason else not message, message


# The program of the page


def read_program() -> str:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "batch_sums" in code
    ]
    return program


def test_program_of_the_page_learns(tmp_path: Path) -> None:
    (tmp_path / "balanced.py").write_text(read_program())
    task = f"{tmp_path / 'balanced.py'}:Balanced"
    spec = Spec(task=task, batch=50, epochs=10, optimizer=Optimizer(lr=3e-2), threads=1)
    first, *_, last = (event for event in train(spec, world=World()) if isinstance(event, Step))
    assert last.loss < 0.3 * first.loss
    assert 0.9 < last.losses["balance"] < 1.5  # 1 if all experts are chosen equally often


@pytest.mark.slow
def test_commands_on_the_program_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "balanced.py").write_text(read_program())
    words = ("balanced.py", "--batch", "40", "--ranks", "2")
    train_words = ("--epochs", "2", "--plan", "zero3,microbatches=2", "--run-dir", "run")
    printed = succeed("train", *words, *train_words, "--set", "save.best=min balance", at=tmp_path).out
    assert "validation balance" in printed
    step = events_of_kind(tmp_path / "run", Step)[-1]
    replayed = succeed("replay", "run", "--step", "50", at=tmp_path).out
    assert f"loss balance: {step.losses['balance']:.4f}"[:-1] in replayed, replayed
    succeed("verify", *words, "--plan", "zero3,microbatches=2", "--steps", "2", at=tmp_path)
    assert "all-reduce" in succeed("comms", *words, "--plan", "ddp,microbatches=2", at=tmp_path).out
    for command in ("plan", "preflight"):
        succeed(command, *words, at=tmp_path)
    evaluated = succeed("evaluate", "run", "--ranks", "1", "--plan", "single", at=tmp_path).out
    last = events_of_kind(tmp_path / "run", Evaluated)[-1].metrics["balance"]
    assert f"{last:.4f}"[:5] in evaluated, evaluated

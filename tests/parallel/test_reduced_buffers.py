"""Declared buffers equal those of a loop by hand on whole batches, under every plan."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from command import succeed
from faults import replaced
from harness import differences, ranks, relative_difference, take_sgd_step_, train_on_ranks
from models import SAMPLES, Pairs, random_normal
from paceline import BufferSum, Layout, Noted, Spec, Started, Task, setup, train
from paceline.data.order import shuffle
from paceline.errors import PlanError, TaskError
from paceline.parallel.data_parallel import reduced_buffers
from paceline.parallel.data_parallel.reduced_buffers import (
    BufferReducer,
    check_reduced_buffers,
    read_reductions,
)
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save
from paceline.training.checkpoint.stored import load_weights
from runs import NEVER, train_run

pytestmark = pytest.mark.processes

STEPS, BATCH, LR = 4, 12, 0.1
SPEC = Spec(
    steps=STEPS, batch=BATCH, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=LR, momentum=0)
)


def set_weights_(model: nn.Module) -> None:
    """Give parameters values that need no random numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).double().sin().view_as(parameter) / 2)


class Quantizer(nn.Module):
    """A codebook of 6 vectors: moving averages of the vectors that were nearest to each (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", torch.arange(24).double().cos().view(6, 4).float() / 2)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(z.detach(), codes).argmin(1)
        if self.training:
            members = F.one_hot(nearest, 6).to(z.dtype)
            self.counts.mul_(0.9).add_(members.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(members.T @ z.detach(), alpha=0.1)
        code = codes[nearest]
        return z + (code - z).detach(), (z - code).square().mean(1)


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        set_weights_(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, commitment = self.quantizer(self.encoder(x))
        return self.decoder(code), commitment


class Compress(Task):
    """A VQ-VAE whose codebook is a moving average."""

    def model(self) -> nn.Module:
        return VqVae()

    def dataset(self, split: str) -> Pairs:
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 5, seed=1))

    def loss(self, output: Any, batch: Any) -> Tensor:
        decoded, commitment = output
        return (decoded - batch[0]).square().mean(1) + 0.25 * commitment

    def layout(self) -> Layout:
        return Layout(buffers={"quantizer.*": BufferSum(decay=0.9)})


class Layer(nn.Module):
    """A residual layer that subtracts a running mean of its output, which it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) - 0.3 * self.mean
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.2)
        return x + y


class Observer(nn.Module):
    """Changes buffers of each kind: from inputs and from activations, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(5, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("positive", torch.zeros(5, dtype=torch.long))
        self.register_buffer("total", torch.zeros(5))
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("input_mean", torch.zeros(5))
        self.register_buffer("same", self.input_mean)
        self.register_buffer("moved", torch.zeros(5))
        self.register_buffer("last", torch.zeros(3))
        set_weights_(self)

    def forward(self, x: Tensor) -> Tensor:
        h = x - 0.5 * self.input_mean - 0.01 * self.moved
        h = h * (1 + 0.01 * self.passes) + 0.001 * (self.positive + self.total)
        if self.training:
            self.passes += 1
            self.positive += (x > 0).sum(0)
            self.total.add_(x.sum(0))
            self.same.lerp_(x.mean(0), 0.2)
            self.moved.mul_(0.8).add_(x.square().sum(0))
        for layer in self.layers:
            h = layer(h)
        h = h * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * h.detach().square().mean(0)
        y = self.head(h) - 0.01 * self.last
        if self.training:
            self.last.copy_(y.detach().sum(0))
        return y


class Observing(Task):
    def model(self) -> nn.Module:
        return Observer()

    def dataset(self, split: str) -> Pairs:
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1))

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)

    def layout(self) -> Layout:
        return Layout(
            buffers={
                "layers.*": "mean",
                "passes": "mean",
                "positive": "sum",
                "total": "sum",
                "scale": "mean",
                "same": "mean",
                "moved": BufferSum(decay=0.8),
                "last": BufferSum(decay=0),
            }
        )


class Contrast(Compress):
    """With a loss of the whole batch."""

    loss = Task.loss  # type: ignore[assignment]

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        decoded, commitment = output
        return torch.logsumexp((decoded - batch[0]).square().mean(1) + commitment, 0)


class Balance(Compress):
    """With a loss of sums over the batch."""

    def batch_sums(self, output: Any, batch: Any) -> dict[str, Tensor]:
        return {"decoded": output[0].square().sum(0)}

    def auxiliary_loss(self, sums: dict[str, Tensor]) -> Tensor:
        return torch.logsumexp(sums["decoded"], 0)


def observing_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def compress_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    decoded, commitment = model(x)
    return ((decoded - x).square().mean(1) + 0.25 * commitment).mean()


def contrast_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    decoded, commitment = model(x)
    return torch.logsumexp((decoded - x).square().mean(1) + commitment, 0)


def balance_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    decoded, commitment = model(x)
    loss = ((decoded - x).square().mean(1) + 0.25 * commitment).mean()
    return loss + torch.logsumexp(decoded.square().sum(0), 0)


BY_HAND: dict[type[Task], Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    Compress: compress_loss,
    Observing: observing_loss,
    Contrast: contrast_loss,
    Balance: balance_loss,
}


@cache
def train_by_hand(kind: type[Task]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses, and the weights and buffers after the training, on whole batches."""
    task = kind()
    model, columns = task.model().double(), task.dataset("train").columns
    if isinstance(model, Observer):
        model.same = model.input_mean  # double() makes two buffers of it
    x, y = columns["x"].double(), columns["y"].double()
    losses = []
    for step in range(STEPS):
        indices = shuffle(np.arange(step * BATCH, (step + 1) * BATCH), SAMPLES, 3).tolist()
        loss = BY_HAND[kind](model, x[indices], y[indices])
        losses.append(loss.item())
        take_sgd_step_(model, loss, LR)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def difference_from_hand(
    size: int, plan: str, kind: type[Task], fault: Any = None, compile: bool = False
) -> float:
    """Return the largest relative difference of losses, weights and buffers."""
    spec = SPEC.model_copy(update={"compile": compile})
    found = train_on_ranks(size, kind(), spec, plan, *([fault] if fault else []))
    losses, weights = train_by_hand(kind)
    assert found.weights.keys() == weights.keys()
    pairs = [(found.losses, losses), *((found.weights[name], weights[name]) for name in weights)]
    return max(relative_difference(*pair) for pair in pairs)


QUICK: list[tuple[type[Task], int, str]] = [
    (Compress, 2, "ddp"),
    (Compress, 4, "zero3,uneven=1,microbatches=2"),
    (Observing, 2, "ddp,microbatches=3"),
    (Observing, 1, "single,microbatches=2"),
    (Observing, 2, "pp=2,microbatches=3"),
    (Contrast, 2, "ddp,microbatches=2"),
]
SLOW: dict[type[Task], list[tuple[int, str]]] = {
    Compress: [
        *((2, "zero1"), (2, "zero2"), (4, "zero3"), (4, "hsdp")),
        *((2, "tp=2"), (4, "dp=2,tp=2"), (4, "zero3,tp=2,microbatches=2")),
        *((2, "pp=2,microbatches=2"), (4, "zero3,pp=2,microbatches=2")),
    ],
    Observing: [
        (4, "ddp,uneven=1,microbatches=2"),
        (2, "zero3,microbatches=2"),
        (2, "ddp,microbatches=2,recompute=full"),
        (2, "zero3,recompute=selective"),
        (2, "pp=2,microbatches=3,recompute=full"),
        (2, "pp=2,microbatches=4,pp_schedule=zbv,recompute=full"),
        (4, "dp=2,pp=2,microbatches=3"),
        (4, "dp=2,pp=2,microbatches=6,pp_schedule=zero-bubble"),
        *((2, f"pp=2,microbatches=4,pp_schedule={name}") for name in ("gpipe", "interleaved", "zbv")),
    ],
    Balance: [(2, "ddp"), (2, "zero3,microbatches=3")],
    Contrast: [(2, "zero3"), (2, "zero3,microbatches=3"), (2, "tp=2,microbatches=2")],
}


@pytest.mark.parametrize(
    ("kind", "size", "plan"),
    [*QUICK, *(pytest.param(kind, *row, marks=pytest.mark.slow) for kind in SLOW for row in SLOW[kind])],
)
def test_declared_buffers_equal_a_loop_by_hand(kind: type[Task], size: int, plan: str) -> None:
    assert difference_from_hand(size, plan, kind) < 1e-10


@pytest.mark.slow  # the C++ compiler is slow
@pytest.mark.parametrize("plan", ["ddp,microbatches=2", "zero3,microbatches=2,recompute=full"])
def test_declared_buffers_of_compiled_blocks(plan: str) -> None:
    assert difference_from_hand(2, plan, Observing, compile=True) < 1e-10


def without_decay() -> Any:
    """Add up the changes of moving averages as if they were counts."""
    return replaced(
        reduced_buffers._ReducedBuffer, "_kept", lambda original: lambda self: self.start.to(self.total.dtype)
    )


def unweighted() -> Any:
    """Weight all ranks equally, whatever their samples."""

    def patch(original: Any) -> Any:
        return lambda self, model, reductions, weight, *rest: original(self, model, reductions, 1 / 8, *rest)

    return replaced(BufferReducer, "__init__", patch)


@pytest.mark.parametrize(
    ("kind", "size", "plan", "fault"),
    [(Compress, 2, "ddp", without_decay), (Observing, 4, "ddp,uneven=1,microbatches=2", unweighted)],
)
def test_wrong_combinations_differ(kind: type[Task], size: int, plan: str, fault: Any) -> None:
    assert difference_from_hand(size, plan, kind, fault) > 1e-4


class Normed(nn.Module):
    """A layer with power iterations, and a normalization of each sample that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.second = nn.Linear(6, 3)
        set_weights_(self)
        torch.manual_seed(0)  # of the initial vectors
        nn.utils.parametrizations.spectral_norm(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)).view(-1, 2, 3)).flatten(1))


class Norming(Observing):
    def model(self) -> nn.Module:
        return Normed()

    def layout(self) -> Layout:
        return Layout(buffers={"*": "mean"})


@pytest.mark.parametrize(
    ("size", "plan"),
    [(2, "ddp,microbatches=2"), pytest.param(2, "zero3,microbatches=3", marks=pytest.mark.slow)],
)
def test_buffers_of_torch_modules(size: int, plan: str) -> None:
    """Power iterations of spectral norm run once in a step, running statistics of InstanceNorm are means."""
    expected = train_on_ranks(1, Norming(), SPEC, "single")
    found = train_on_ranks(size, Norming(), SPEC, plan)
    assert not differences(found, expected, 1e-10)
    assert found.weights["norm.running_mean"].any()


class Undeclared(Observing):
    declared: str = ""  # for all buffers

    def layout(self) -> Layout:
        return Layout(buffers={"*": self.declared} if self.declared else None)


class Late(nn.Module):
    """Has buffers that are equal on all ranks, and one that differs from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("cut", torch.eye(6).bool(), persistent=False)
        self.register_buffer("late", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        self.passes += self.training
        if self.training:
            self.late.copy_(torch.where(self.passes >= 3, h.detach().mean(0), self.late))
        return self.second(h)


class Later(Undeclared):
    def model(self) -> nn.Module:
        return Late()


def read_notes(task: Task, plan: str, run: Path | None = None) -> tuple[list[str], dict[str, Tensor]]:
    """Train on this rank. Return the notes during the training, and the buffers at its end."""
    buffers: dict[str, Tensor] = {}

    def observe(model: nn.Module, what: str, step: int) -> None:
        buffers.update({name: buffer.clone() for name, buffer in model.named_buffers()})

    folder = RunFolder(run) if run is not None else None
    spec = SPEC.model_copy(update={"steps": 6, "threads": 1, "save": Save(minutes=NEVER)})
    events = list(train(spec, parse(plan), task=task, run=folder, observe=observe))
    assert isinstance(events[0], Started)
    notes = [*events[0].notes, *(f"{e.step}: {e.message}" for e in events if isinstance(e, Noted))]
    return notes, buffers


DIFFER = "different values on the data ranks, other than in one process; declare in layout().buffers"


def test_buffers_that_differ_are_reported_once() -> None:
    (notes, buffers), (others, other_buffers) = ranks(2)(read_notes, Undeclared(), "ddp")
    [note] = notes
    assert note.startswith(f"1: buffers positive, total, scale, input_mean, … have {DIFFER}")
    assert notes == others
    assert {name for name in buffers if not buffers[name].equal(other_buffers[name])} == {*buffers} - {
        "passes"
    }
    for task in (Observing(), Compress()):
        assert ranks(2)(read_notes, task, "zero3")[0][0] == []


def test_a_buffer_that_differs_later_is_reported_then() -> None:
    [note] = ranks(2)(read_notes, Later(), "zero2")[0][0]
    assert note.startswith(f"4: buffer late has {DIFFER}")
    assert ranks(2)(read_notes, Later(), "pp=2,microbatches=2")[0][0] == []


@pytest.mark.slow
def test_buffers_of_later_stages_are_compared() -> None:
    [note] = ranks(4)(read_notes, Later(), "dp=2,pp=2,microbatches=2")[0][0]
    assert note.startswith(f"2: buffer late has {DIFFER}")


def test_buffers_of_each_rank(tmp_path: Path) -> None:
    """They are announced, and checkpoints have those of rank 0."""
    task = Undeclared(declared="none")
    results = ranks(2)(read_notes, task, "ddp", tmp_path)
    notes, buffers = results[0]
    assert notes == [
        "each rank has its own values of the buffers that layout() declares 'none' (passes, positive, total, "
        "scale, …); checkpoints have those of rank 0"
    ]
    saved = load_weights(RunFolder(tmp_path).checkpoint(6))
    assert all(saved[name].equal(buffer) for name, buffer in buffers.items())
    assert not saved["last"].equal(results[1][1]["last"])


def test_resumed_trainings_continue_the_buffers(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"task": f"{__file__}:Observing", "threads": 1})
    spec = spec.model_copy(update={"save": Save(minutes=NEVER)})
    assert train_run(2, spec, "zero3", tmp_path, 2)[-1].reason == "stopped"
    assert train_run(2, spec, "ddp,microbatches=2", tmp_path)[-1].reason == "done"
    found, (_, expected) = load_weights(RunFolder(tmp_path).checkpoint(STEPS)), train_by_hand(Observing)
    assert found.keys() >= expected.keys()
    assert all(relative_difference(found[name], expected[name]) < 1e-10 for name in expected)


REFUSED: dict[str, tuple[Any, str]] = {
    "no dict": ("mean", "must be a dict of patterns of names, got str"),
    "no buffer": ({"scales": "mean"}, "no buffer of the model matches 'scales'; did you mean scale"),
    "no word": ({"scale": "average"}, r"buffers\['scale'\] is 'average'; expected 'sum', 'mean', 'none' or"),
    "a number": ({"scale": 0.9}, r"buffers\['scale'\] is 0.9; expected 'sum'"),
    "two patterns": ({"scale": "mean", "s*": "sum"}, "scale matches two patterns with different values"),
    "two names": ({"same": "mean", "input_*": "sum"}, "input_mean matches two patterns"),
    "integers": ({"positive": BufferSum(0.9)}, "positive has dtype int64, and decay=0.9 requires a floating"),
    "flags": ({"cut": "sum"}, "cut has dtype bool, which cannot be combined; use 'none'"),
    "BatchNorm": ({"norm.*": "mean"}, "norm.running_mean belongs to BatchNorm, whose statistics are already"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_declarations_that_do_not_fit(what: str) -> None:
    declared, message = REFUSED[what]
    model = Late() if what in ("flags", "BatchNorm") else Observer()
    with pytest.raises(TaskError, match=message):
        read_reductions(Layout(buffers=declared), model)


@pytest.mark.parametrize("decay", [-0.1, 1.5, True, "0.9", float("nan")])
def test_decays_that_are_no_decays(decay: Any) -> None:
    with pytest.raises(TaskError, match="BufferSum: decay must be at least 0 and at most 1, got"):
        BufferSum(decay)


class Inside(Observing):
    """Declares buffers of blocks only."""

    def layout(self) -> Layout:
        return Layout(buffers={"layers.*": "mean"})


@pytest.mark.parametrize(
    ("task", "plan", "message"),
    [
        (
            Observing(),
            "local-sgd,period=2",
            "plan local-sgd.* cannot combine the changes of buffer 'layers.0",
        ),
        (Observing(), "parameter-server", "plan parameter-server.* cannot combine the changes of buffer"),
        (Inside(), "cp=2", "cp runs blocks on slices of the sequence, and buffer 'layers.0.mean', whose"),
        (
            Inside(),
            "ddp,recompute=selective",
            "a recomputed block that is compiled changes buffers twice, and buff",
        ),
    ],
)
def test_plans_that_cannot_combine_buffers(task: Task, plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_reduced_buffers(task, parse(plan).resolve(4), Observer(), compiles=True)
    check_reduced_buffers(Undeclared(declared="none"), parse(plan).resolve(4), Observer())


def refuse_own_loop() -> str:
    with pytest.raises(PlanError) as raised:
        setup(Observer(), layout=Layout(buffers={"scale": "mean"}))
    return str(raised.value)


def test_own_loops_refuse_declared_buffers() -> None:
    assert "paceline.setup does not combine the changes of buffers" in ranks(1)(refuse_own_loop)[0]


def test_program_of_the_page(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "Codebook" in code
    ]
    (tmp_path / "compress.py").write_text(program)
    words = ("--plan", "ddp,microbatches=2", "--ranks", "2", "--batch", "8", "--steps", "2")
    succeed("verify", "compress.py:Compress", *words, "--json", "verdict.json", at=tmp_path)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["same"]
    assert "compared_with" not in verdict  # it equals one process on whole batches

"""A loss over the whole global batch equals that of a plain loop on whole batches, under every plan."""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from paceline.events import Evaluated, Step
from paceline.parallel.loss.batch_shares import BatchShares
from paceline.parallel.loss.whole_tensor import WholeTensor
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record
from paceline.training.step import step
from paceline.training.step.step import TrainingStep

pytestmark = pytest.mark.processes

COUNT, VALIDATION, CLASSES = 37, 13, 3  # samples: one epoch is longer than the training
SPEC = Spec(
    steps=4,
    batch=8,
    seed=5,
    precision="fp64",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
)


class Encoders(nn.Module):
    """Two encoders and a temperature, which does not depend on the samples."""

    def __init__(self, norm: bool, dropout: float):
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 4),
        )
        self.text = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {"image": self.image(image), "text": self.text(text), "scale": self.scale.exp()}


def clip_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return InfoNCE, with weights that depend on the positions and classes of the samples."""
    image, text = (F.normalize(output[name], dim=-1) for name in ("image", "text"))
    logits = output["scale"] * image @ text.T
    targets = torch.arange(len(batch["class"]))
    rows = F.cross_entropy(logits, targets, reduction="none") + F.cross_entropy(
        logits.T, targets, reduction="none"
    )
    return (rows * torch.linspace(0.5, 1.5, len(rows), dtype=rows.dtype) * (1 + batch["class"])).mean()


def barlow_twins_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    first, second = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (output["image"], output["text"]))
    correlation = first.T @ second / len(first)
    difference = (correlation - torch.eye(len(correlation), dtype=correlation.dtype)).square()
    return difference.diagonal().sum() + 0.1 * (difference.sum() - difference.diagonal().sum())


def triplet_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the batch-hard triplet loss: of each sample, the farthest positive and the nearest negative."""
    distances = torch.cdist(output["image"], output["text"])
    same = batch["class"][:, None] == batch["class"]
    positive = distances.masked_fill(~same, -1e6).amax(1)
    negative = distances.masked_fill(same, 1e6).amin(1)
    return F.softplus(positive - negative).mean()


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "clip": clip_loss,
    "barlow": barlow_twins_loss,
    "triplets": triplet_loss,
}


def make_samples(split: str) -> models.Rows:
    count, seed = (COUNT, 1) if split == "train" else (VALIDATION, 2)
    return models.Rows(
        **{
            "image": models.random_normal(count, 6, seed=seed),
            "text": models.random_normal(count, 3, seed=seed + 10),
            "class": models.random_integers(CLASSES, count, seed=seed),
        }
    )


class Contrastive(Task):
    which: str = "clip"
    norm: bool = False
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return Encoders(self.norm, self.dropout)

    def dataset(self, split: str) -> models.Rows:
        return make_samples(split)

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return batch["image"], batch["text"]

    def global_loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return LOSSES[self.which](output, batch)

    def metrics(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"length": output["image"].norm(dim=-1)}


@cache
def train_plainly(task: Contrastive, microbatches: int = 1) -> TrainingResult:
    """Return what a plain loop computes, which keeps the graphs of all micro-batches."""
    model, weights, _ = record(task.model, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()

    def read(samples: models.Rows, indices: list[int]) -> dict[str, Tensor]:
        rows = [samples[index] for index in indices]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {name: x.double() if x.is_floating_point() else x for name, x in stacked.items()}

    def run(batch: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
        outputs = [
            model(*inputs)
            for inputs in zip(batch["image"].chunk(parts), batch["text"].chunk(parts), strict=True)
        ]
        return {name: torch.cat([output[name] for output in outputs]) for name in ("image", "text")} | {
            "scale": outputs[0]["scale"]
        }

    losses, norms = [], []
    train, validation = make_samples("train"), make_samples("validation")
    for indices in shuffle(np.arange(32), COUNT, SPEC.seed).reshape(4, 8).tolist():
        batch = read(train, indices)
        loss = LOSSES[task.which](run(batch, microbatches), batch)
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
    model.eval()
    total, lengths = 0.0, []
    with torch.no_grad():
        for indices in ([*range(8)], [*range(8, VALIDATION)]):
            batch = read(validation, indices)
            output = run(batch, 1)
            total += LOSSES[task.which](output, batch).item() * len(indices)
            lengths.append(output["image"].norm(dim=-1))
    final = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    metrics = {"loss": total / VALIDATION, "length": torch.cat(lengths).mean().item()}
    return TrainingResult(losses, norms, [0.1] * 4, [metrics], final, ())


@pytest.mark.parametrize(
    ("ranks", "plan", "which"),
    [
        (1, "single,microbatches=2", "barlow"),
        (2, "ddp,microbatches=2", "clip"),
        (2, "zero2", "triplets"),
        (2, "zero3", "barlow"),
        (2, "tp=2,microbatches=2", "clip"),
        pytest.param(4, "tp=2,zero=3,microbatches=2", "clip", marks=pytest.mark.slow),
        pytest.param(3, "ddp,uneven=1", "clip", marks=pytest.mark.slow),
        pytest.param(3, "zero3,uneven=1,microbatches=2", "barlow", marks=pytest.mark.slow),
        pytest.param(1, "single", "clip", marks=pytest.mark.slow),
        pytest.param(2, "zero1", "triplets", marks=pytest.mark.slow),
        pytest.param(2, "zero2,microbatches=2", "barlow", marks=pytest.mark.slow),
        pytest.param(4, "ddp,microbatches=2", "triplets", marks=pytest.mark.slow),
        pytest.param(4, "hsdp", "clip", marks=pytest.mark.slow),
    ],
)
def test_global_loss_equals_a_plain_loop(ranks: int, plan: str, which: str) -> None:
    task = Contrastive(which=which)
    assert not differences(train_on_ranks(ranks, task, SPEC, plan), train_plainly(task), 1e-10)


@pytest.mark.parametrize(
    ("ranks", "plan", "microbatches"),
    [
        (2, "ddp,microbatches=2", 2),
        pytest.param(2, "ddp", 1, marks=pytest.mark.slow),
        pytest.param(2, "zero3,microbatches=2", 2, marks=pytest.mark.slow),
    ],
)
def test_batch_norm_is_updated_once(ranks: int, plan: str, microbatches: int) -> None:
    task = Contrastive(norm=True)
    expected = train_plainly(task, microbatches)
    assert not differences(train_on_ranks(ranks, task, SPEC, plan), expected, 1e-10)


def without_data_ranks() -> Any:
    """Start the backward pass without the factor by which engines divide."""
    return replaced(
        TrainingStep,
        "_start_gradient",
        lambda start: lambda self, *args: start(self, *args) / self.data_ranks,
    )


def in_another_order() -> Any:
    return replaced(
        BatchShares,
        "gather",
        lambda gather: lambda self, tensors: [rows.roll(1, 0) for rows in gather(self, tensors)],
    )


def with_whole_shared_gradients() -> Any:
    """Do not divide the gradient of the temperature among the parts of the batch."""

    def patch(own_gradient: Any) -> Any:
        return lambda self, gradient, at: (
            gradient if self.kind == "shared" else own_gradient(self, gradient, at)
        )

    return replaced(WholeTensor, "own_gradient", patch)


@pytest.mark.parametrize("fault", [without_data_ranks, in_another_order, with_whole_shared_gradients])
def test_faults_are_found(fault: Any) -> None:
    task = Contrastive()
    assert differences(train_on_ranks(2, task, SPEC, "ddp", fault), train_plainly(task), 1e-10)


def with_buffers_of_both_passes() -> Any:
    return replaced(step, "preserved_buffers", lambda _: lambda model: contextlib.nullcontext())


def test_buffers_of_both_passes_are_found() -> None:
    task = Contrastive(norm=True)
    found = train_on_ranks(1, task, SPEC, "single,microbatches=2", with_buffers_of_both_passes)
    names = {line.split()[0] for line in differences(found, train_plainly(task, 2), 1e-10)}
    assert {"image.1.running_mean", "image.1.num_batches_tracked"} <= names


@contextlib.contextmanager
def with_other_draws_in_each_pass() -> Iterator[None]:
    with replaced(TrainingStep, "_begin_microbatch", lambda _: lambda self, step, microbatch: None):
        yield


def error_of(task: Task, plan: str, fault: Any = contextlib.nullcontext) -> str:
    try:
        harness.train_on_this_rank(task, SPEC, plan, fault)
    except Error as error:
        return str(error)
    return ""


def test_both_passes_have_the_same_dropout() -> None:
    task = Contrastive(dropout=0.5)
    plan = "ddp,microbatches=2"
    assert harness.ranks(2)(error_of, task, plan) == ["", ""]
    for message in harness.ranks(2)(error_of, task, plan, with_other_draws_in_each_pass):
        assert "the model has another output when it repeats a micro-batch" in message


class Sequences(Contrastive):
    """The mean over the positions of a causal transformer, compared with a target."""

    def model(self) -> nn.Module:
        return models.Gpt()

    def dataset(self, split: str) -> Any:
        tokens = models.random_integers(11, COUNT, 8)
        return (
            models.Rows(tokens=tokens, target=models.random_normal(COUNT, 11)) if split == "train" else None
        )

    def inputs(self, batch: Any) -> Any:
        return batch["tokens"]

    def global_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.mean(1) @ batch["target"].T, torch.arange(len(output)))


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(2, "cp=2,microbatches=2"), pytest.param(4, "dp=2,cp=2,microbatches=2", marks=pytest.mark.slow)],
)
def test_context_parallelism(ranks: int, plan: str) -> None:
    assert not harness.differences_from_single(ranks, plan, Sequences(), SPEC)


class Odd(Contrastive):
    """A task that returns or reads what cannot be combined."""

    what: str = "right"

    def collate(self, samples: list[Any]) -> Any:
        batch = super().collate(samples)
        positions = torch.arange(len(samples))
        names = [str(sample["class"]) for sample in samples]
        ragged = torch.ones(len(samples), 1 + int(batch["class"].sum()))
        return batch | {
            "names": names,
            "mean": batch["text"].mean(),
            "positions": positions,
            "ragged": ragged,
        }

    def model(self) -> nn.Module:
        return Summing() if self.what == "sum" else super().model()

    def global_loss(self, output: dict[str, Tensor], batch: Any) -> Any:
        loss = super().global_loss(output, batch)
        match self.what:
            case "no tensor":
                return loss.item()
            case "dict":
                return {"loss": loss}
            case "rows":
                return output["image"].sum(-1)
            case "detached":
                return loss.detach()
            case "integer":
                return output["image"].argmax()
            case "string":
                return loss * len(batch["names"][0])
            case "mean" | "positions" | "ragged":
                return loss * batch[self.what].double().mean()
        return loss

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor]:
        return {}


class Summing(Encoders):
    """A model that returns a sum over samples."""

    def __init__(self) -> None:
        super().__init__(norm=False, dropout=0.0)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        output = super().forward(image, text)
        return output | {"scale": output["image"].sum()}


REFUSED = {
    "right": "",
    "no tensor": "global_loss() must return a tensor, got float",
    "dict": "global_loss() must return one number, got a dict; return the sum of its losses",
    "rows": "global_loss() must return one number, got a tensor of shape (8,); return its mean",
    "detached": "global_loss() returned a tensor that does not depend on the trained parameters",
    "integer": "global_loss() must return a real floating-point tensor, got int64",
    "string": "global_loss() reads an item of the batch of type str",
    "mean": "which does not have a row for each of the 4 samples",
    "positions": "which is the same for all parts of the batch",
    "ragged": "which has rows of different sizes on ranks; pad with paceline.Ragged",
    "sum": "which does not have a row for each of the 4 samples",
}


def errors_of(whats: list[str]) -> list[str]:
    return [error_of(Odd(what=what), "ddp") for what in whats]


def test_what_cannot_be_combined_is_refused() -> None:
    for found in harness.ranks(2)(errors_of, [*REFUSED]):
        for message, expected in zip(found, REFUSED.values(), strict=True):
            assert expected in message if expected else not message, (message, expected)


def read_program() -> str:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "class Matching" in code
    ]
    return program


def test_program_of_the_page_learns(tmp_path: Path) -> None:
    (tmp_path / "matching.py").write_text(read_program())
    task = f"{tmp_path / 'matching.py'}:Matching"
    spec = Spec(task=task, batch=40, epochs=8, optimizer=Optimizer(lr=1e-2), threads=1)
    losses = [event.loss for event in train(spec, world=World()) if isinstance(event, Step)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_commands_on_the_program_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "matching.py").write_text(read_program())
    words = ("matching.py", "--batch", "40", "--ranks", "2")
    succeed("train", *words, "--epochs", "4", "--run-dir", "run", "--profile", at=tmp_path)
    succeed("verify", *words, "--plan", "zero3,microbatches=2", "--steps", "2", at=tmp_path)
    assert "all-gather" in succeed("comms", *words, "--plan", "ddp,microbatches=2", at=tmp_path).out
    for command in ("plan", "preflight"):
        succeed(command, *words, at=tmp_path)
    replayed = succeed("replay", "run", "--step", "3", at=tmp_path).out
    assert f"{events_of_kind(tmp_path / 'run', Step)[2].loss:.4f}"[:5] in replayed, replayed
    evaluated = succeed("evaluate", "run", "--ranks", "1", "--plan", "single", at=tmp_path).out
    last = events_of_kind(tmp_path / "run", Evaluated)[-1].metrics["loss"]
    assert float(evaluated.split()[-1]) == pytest.approx(last, rel=1e-5)

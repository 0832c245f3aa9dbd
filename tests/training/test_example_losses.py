"""The examples with several optimizers and with a global loss equal loops by hand, in float64."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import drawing
from faults import replaced
from harness import relative_difference, train_on_ranks
from paceline import Spec
from paceline.data.order import shuffle
from paceline.spec import Optimizer
from paceline.task import load_task
from paceline.training.step import update_sequence
from paceline.training.step.step import TrainingStep

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH, SAMPLES, SEED, LR = 4, 8, 48, 3, 0.05
SPEC = Spec(
    steps=STEPS,
    batch=BATCH,
    seed=SEED,
    precision="fp64",
    threads=1,
    optimizer=Optimizer(name="sgd", lr=LR, momentum=0),
)
gan: Any = type(load_task(f"{EXAMPLES / 'gan.py'}:Gan", {}))
contrastive: Any = type(load_task(f"{EXAMPLES / 'contrastive.py'}:Contrastive", {}))


def fill_(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).double().sin().view_as(parameter) / 4)
    return model


class Gan(gan):  # type: ignore[misc]
    width: int = 6

    def model(self) -> nn.Module:
        return fill_(super().model())


class Pairs:
    """Two views of each image that do not change."""

    def __init__(self, images: Tensor):
        draw = torch.Generator().manual_seed(1)
        self.views = [image + 0.2 * torch.randn(image.shape, generator=draw) for image in (images, images)]

    def __len__(self) -> int:
        return len(self.views[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.views[0][index], self.views[1][index]


class Contrastive(contrastive):  # type: ignore[misc]
    width: int = 4

    def model(self) -> nn.Module:
        return fill_(super().model())

    def dataset(self, split: str) -> Pairs | None:
        return Pairs(super().dataset(split).images[:SAMPLES]) if split == "train" else None


def batches(samples: int) -> list[list[int]]:
    positions = np.arange(STEPS * BATCH)
    return shuffle(positions, samples, SEED).reshape(STEPS, BATCH).tolist()


def descend_(loss: Tensor, parameters: Sequence[Tensor]) -> None:
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= LR * gradient


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def draw_noise(update: str, positions: range) -> Tensor:
    """Return the noise of an update for samples of the training, from an oracle's integers."""
    seed = hash_to_seed(hash_to_seed(SEED, "update", update, 0), "rng", "train")
    rows = [drawing.Oracle(number, seed, f"{update}/inputs").randn(16) for number in positions]
    return torch.from_numpy(np.stack(rows))


def hash_to_seed(*words: int | str) -> int:
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@cache
def train_gan_by_hand() -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the sums of both losses, and the weights."""
    model = Gan().model().double()
    images = Gan().dataset("train").images.double()
    of_critic = torch.optim.AdamW(
        [*model.critic.parameters(), *model.score.parameters()], 5e-4, (0.5, 0.999), weight_decay=0.0
    )
    of_generator = torch.optim.AdamW(model.generator.parameters(), 5e-4, (0.5, 0.999), weight_decay=0.0)
    losses = []
    for step, indices in enumerate(batches(len(images))):
        positions = range(step * BATCH, (step + 1) * BATCH)
        real = images[indices].flatten(1)
        fake = model.generator(draw_noise("critic", positions)).detach()
        loss = (F.softplus(-score(model, real)) + F.softplus(score(model, fake))).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        losses.append(loss.item())
        loss = F.softplus(-score(model, model.generator(draw_noise("generator", positions)))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        losses[-1] += loss.item()
    return losses, weights_of(model)


def score(model: Any, images: Tensor) -> Tensor:
    result: Tensor = model.score(model.critic(images))
    return result


@cache
def train_contrastive_by_hand() -> tuple[list[float], dict[str, np.ndarray]]:
    model, pairs = Contrastive().model().double(), Contrastive().dataset("train")
    assert pairs is not None
    losses = []
    for indices in batches(SAMPLES):
        first, second = (F.normalize(model.layers(view[indices].double()), dim=1) for view in pairs.views)
        logits = first @ second.T * model.log_scale.exp()
        of_rows, of_columns = (-logits.log_softmax(dim).diagonal().mean() for dim in (1, 0))
        loss = (of_rows + of_columns) / 2
        losses.append(loss.item())
        descend_(loss, [*model.parameters()])
    return losses, weights_of(model)


BY_HAND = {"gan": (Gan, train_gan_by_hand), "contrastive": (Contrastive, train_contrastive_by_hand)}


def find_difference(size: int, name: str, plan: str, *fault: Any) -> float:
    """Return the largest relative difference of losses and weights from the loop by hand."""
    task, train_by_hand = BY_HAND[name]
    losses, weights = train_by_hand()
    found = train_on_ranks(size, task(), SPEC, plan, *fault)
    assert found.weights.keys() == weights.keys()
    pairs: list[tuple[Any, Any]] = [(found.losses, losses)]
    pairs += [(found.weights[key], weights[key]) for key in weights]
    return max(relative_difference(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("size", "name", "plan"),
    [
        (2, "gan", "ddp"),
        (2, "contrastive", "ddp"),
        *(
            pytest.param(size, name, plan, marks=pytest.mark.slow)
            for size, name, plan in [
                *((4, "gan", "ddp"), (4, "contrastive", "ddp"), (2, "gan", "zero3"), (4, "gan", "zero3")),
                *((2, "contrastive", "zero3"), (4, "contrastive", "zero2,microbatches=2")),
            ]
        ),
    ],
)
def test_an_example_equals_a_loop_by_hand(size: int, name: str, plan: str) -> None:
    assert find_difference(size, name, plan) < 1e-10


def without_data_ranks() -> Any:
    return replaced(
        TrainingStep,
        "_start_gradient",
        lambda start: lambda self, *args: start(self, *args) / self.data_ranks,
    )


def with_one_seed() -> Any:
    """Let all updates draw the same noise."""
    return replaced(update_sequence, "derive_seed", lambda derive: lambda seed, *purpose: seed)


def test_faults_are_found() -> None:
    assert find_difference(2, "contrastive", "ddp", without_data_ranks) > 1e-3
    assert find_difference(2, "gan", "ddp", with_one_seed) > 1e-3

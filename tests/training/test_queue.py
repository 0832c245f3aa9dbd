"""A queue of earlier samples, which global_loss fills, compared with a plain loop."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from harness import TrainingResult, differences, take_sgd_step_, train_on_ranks
from paceline import Spec, Task
from paceline.data.order import shuffle
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record

pytestmark = pytest.mark.processes

COUNT, BATCH, LENGTH = 24, 8, 20
SPEC = Spec(
    batch=BATCH,
    steps=4,
    seed=5,
    precision="fp64",
    evaluate_every=3,
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0),
)


class Embedder(nn.Module):
    """Embeds samples. fills: fill the queue in the forward pass, and not in the loss."""

    def __init__(self, fills: bool):
        super().__init__()
        self.fills = fills
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("queue", torch.zeros(LENGTH, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key, before = F.normalize(self.layers(x.flip(1)), dim=-1), self.queue
        if self.fills and self.training:
            before = self.queue.clone()
            self.queue.copy_(torch.cat([before[len(key) :], key.detach()]))
        return F.normalize(self.layers(x), dim=-1), key, before


def compare(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    similarity = query @ torch.cat([key, queue]).T
    return F.cross_entropy(similarity / 0.2, torch.arange(len(query)))


class Queued(Task):
    fills: bool = False

    def model(self) -> nn.Module:
        return Embedder(self.fills)

    def dataset(self, split: str) -> models.Rows:
        return models.Pairs(x=models.random_normal(COUNT if split == "train" else BATCH, 6, seed=len(split)))

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        query, key, queue = output
        loss = compare(query, key, queue.clone())
        if torch.is_grad_enabled() and not self.fills:
            with torch.no_grad():
                queue.copy_(torch.cat([queue[len(key) :], key]))
        return loss


@cache
def train_plainly() -> TrainingResult:
    task = Queued()
    model, weights, _ = record(task.model, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()
    samples, validation = (
        torch.stack([row for [row] in rows]).double()
        for rows in (
            [task.dataset(split)[at] for at in range(size)]
            for split, size in (("train", COUNT), ("validation", BATCH))
        )
    )
    order = np.concatenate([shuffle(np.arange(COUNT) + COUNT * epoch, COUNT, SPEC.seed) for epoch in (0, 1)])
    losses, norms, metrics, queue = [], [], [], torch.zeros(LENGTH, 4, dtype=torch.float64)
    for at in range(4):
        query, key, _ = model(samples[order[at * BATCH : (at + 1) * BATCH]])
        loss = compare(query, key, queue)
        queue = torch.cat([queue[BATCH:], key.detach()])
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
        if at in (2, 3):
            with torch.no_grad():
                query, key, _ = model(validation)
                metrics.append({"loss": compare(query, key, queue).item()})
    final = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    return TrainingResult(losses, norms, [0.1] * 4, metrics, final | {"queue": queue.numpy()}, ())


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (1, "single"),
        (2, "ddp,microbatches=2"),
        (2, "zero3"),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(4, "hsdp", marks=pytest.mark.slow),
        pytest.param(3, "ddp,uneven=1", marks=pytest.mark.slow),
    ],
)
def test_a_queue_has_the_samples_of_all_ranks(size: int, plan: str) -> None:
    assert not differences(train_on_ranks(size, Queued(), SPEC, plan), train_plainly(), 1e-10)


def test_a_queue_that_forward_fills_differs() -> None:
    with pytest.raises(AssertionError):  # ranks have queues of their own samples, and so other results
        assert not differences(train_on_ranks(2, Queued(fills=True), SPEC, "ddp"), train_plainly(), 1e-10)

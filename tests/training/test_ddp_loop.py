"""A training loop in plain torch on two ranks, whose losses Paceline must reproduce exactly."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import models
from harness import TrainingResult, differences, ranks, train_on_ranks
from paceline import Spec, Task
from paceline.data.order import shuffle
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record

pytestmark = pytest.mark.processes

STEPS, BATCH, SEED, LR, CLIP = 12, 8, 5, 0.05, 1.0


def train_with_torch(task: Task, name: str, clip: float | None) -> TrainingResult:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = task.dataset("train")
    order = shuffle(np.arange(STEPS * BATCH), len(dataset), SEED)
    model, weights, _ = record(task.model, SEED)
    fill_(model, weights, torch.device("cpu"))
    ddp = DistributedDataParallel(model.double())
    if name == "sgd":
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        indices = order[step * BATCH : (step + 1) * BATCH]
        share = BATCH // world_size
        x, y = default_collate([dataset[i] for i in indices[rank * share : (rank + 1) * share]])
        x = x.double()
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(
                ddp.parameters(), clip if clip is not None else float("inf")
            ).item()
        )
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return TrainingResult(losses, norms, [LR] * STEPS, [], final, ())


class TrainImages(models.Images):
    def dataset(self, split: str) -> models.Pairs | None:
        return super().dataset(split) if split == "train" else None


PLANS = ("ddp", "zero1", "zero3", "ddp,microbatches=2")
FAST_CASES = [
    *[("ddp", "sgd", None), ("zero1", "sgd", CLIP)],
    *[("zero3", "adamw", CLIP), ("ddp,microbatches=2", "adamw", None)],
]


@pytest.mark.parametrize(
    ("plan", "optimizer", "clip"),
    [
        case if case in FAST_CASES else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(PLANS, ("sgd", "adamw"), (None, CLIP))
    ],
)
def test_losses_equal_those_of_a_plain_torch_loop(plan: str, optimizer: str, clip: float | None) -> None:
    spec = Spec(
        steps=STEPS,
        batch=BATCH,
        seed=SEED,
        precision="fp64",
        optimizer=Optimizer(name=optimizer, lr=LR, clip=clip),
    )  # type: ignore[arg-type]
    expected = ranks(2)(train_with_torch, TrainImages(), optimizer, clip)[0]
    found = train_on_ranks(2, TrainImages(), spec, plan)
    assert not differences(found, expected, 1e-12)
    assert expected.losses[-1] < expected.losses[0]

"""Expected tables of the lessons about large batches and parameter servers, in one process."""

import numpy as np
import torch
from torch import nn

from pages import ROOT


def expect_parameter_server(n: int) -> dict:
    workers = max(n - 1, 1)

    def train(rate: float) -> list[tuple]:
        """Return (worker, staleness, weight): a gradient belongs to the weight of `delay` updates ago."""
        weights, lines = [1.0], []
        for update in range(12):
            delay = min(update, workers - 1)
            weights.append(weights[-1] - rate * weights[-1 - delay])
            lines.append((1 + update % workers if n > 1 else 0, delay, weights[-1]))
        return lines

    given = [len(range(worker, 12, workers)) for worker in range(workers)]
    roles = [["server", 0], *(["worker", count] for count in given)] if n > 1 else [["both", 12]]
    return {
        "What each rank did": [[r, *role] for r, role in enumerate(roles)],
        "Updates with a learning rate of 0.4": [[u, *line] for u, line in enumerate(train(0.4))],
        "The weight, by learning rate": [
            [rate, *(train(rate)[count - 1][2] for count in (1, 4, 8, 12))] for rate in (0.2, 0.4, 0.9)
        ],
        "Elements in P through each server, while every worker makes an update": [
            [4, 8, 8],
            [16, 32, 32],
            [16, 32, 8],
        ],
    }


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(ROOT / "src/paceline/tasks/digits.npz") as data:
        x = torch.from_numpy(data["images"]).double().flatten(1) / int(data["images"].max())
        return x, torch.from_numpy(data["labels"]).long()


def draw_images() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 1, 4, 4, generator=draw)
    labels = torch.randint(10, (1797,), generator=draw)
    noise = torch.randn(1797, 8, 8, generator=draw)
    large = nn.Upsample((8, 8), mode="bilinear")(patterns).squeeze(1)
    return ((large[labels] + 1.5 * noise) / 4).view(1797, 64).double(), labels


def train_images(
    samples: tuple[torch.Tensor, torch.Tensor], batch: int, rate: float, warmup: int = 0, lars: bool = False
) -> tuple[int, float, float, float]:
    """Return steps, last loss, and accuracies of training and test, on whole batches, by modules of torch."""
    x, y = samples
    draw = torch.Generator().manual_seed(0)
    first, second = nn.Linear(64, 32, bias=False), nn.Linear(32, 10, bias=False)
    model = nn.Sequential(first, nn.Tanh(), second).double()
    with torch.no_grad():
        first.weight.copy_((torch.randn(64, 32, generator=draw).double() / 8).T)
        second.weight.copy_((torch.randn(32, 10, generator=draw).double() / 6).T)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    epochs = [torch.randperm(1536, generator=torch.Generator().manual_seed(e)) for e in range(4)]
    batches = [part for order in epochs for part in order.split(batch)]
    for step, mine in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        if lars:
            for weight in model.parameters():
                weight.grad *= 0.02 * weight.detach().norm() / weight.grad.norm()
        optimizer.step()
    train, test = (
        (model(x[part]).argmax(1) == y[part]).double().mean().item()
        for part in (slice(1536), slice(1536, None))
    )
    return len(batches), loss.item(), train, test


def expect_large_batch(n: int) -> dict:
    runs = {
        "batch 32": (32, 0.02),
        "batch 512": (512, 0.02),
        "batch 512, linear rule": (512, 0.32),
        "batch 512, linear rule, warm-up": (512, 0.32, 4),
        "batch 512, LARS": (512, 1.0, 0, True),
    }
    sets = {"digits": load_digits(), "generated images": draw_images()}
    results = {
        name: {run: train_images(samples, *arguments) for run, arguments in runs.items()}
        for name, samples in sets.items()
    }
    published = (
        (8192, 14076, 76.3),
        (32768, 3519, 75.4),
        (32768, 2503, 74.9),
        (65536, 1800, 75.8),
        (81920, 1440, 75.1),
    )
    return {
        **{
            f"{samples}, after 4 epochs": [
                [name, *result, result[2] - result[3]] for name, result in trained.items()
            ]
            for samples, trained in results.items()
        },
        "Every rank has the same result: last loss of batch 32": [
            [r, results["digits"]["batch 32"][1]] for r in range(n)
        ],
        "ResNet-50 on ImageNet, published": [[*row, row[0] * row[1] / 1281167] for row in published],
    }


def expect_machine(n: int) -> dict:
    speeds = {"memory of the GPU": 3350, "NVLink": 900, "PCIe 5": 64, "network of 400 Gbit/s": 50}
    title = "Seconds for 140 GB, the weights of 70 billion parameters in bfloat16"
    return {title: [[name, speed, 140 / speed] for name, speed in speeds.items()]}

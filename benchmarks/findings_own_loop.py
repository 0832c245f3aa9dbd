"""A loop with `paceline.setup`, for benchmarks/findings.py. Arguments: run, steps, MB that a step leaks."""

import sys
import time

import torch
from torch import nn

import paceline

LEAKED = []


def train(run: str, steps: int, leak_MB: float) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = paceline.setup(model, optimizer, plan="ddp", run=run, monitor=0.2)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step * trainer.ranks + trainer.rank)
        batch = torch.randn(64, 32, generator=draw)
        time.sleep(0.02)  # as a larger model would take
        loss = (trainer.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        trainer.backward(loss)
        trainer.step(clip=1.0)
        if leak_MB:
            LEAKED.append(torch.ones(int(leak_MB * 2**18)))
    return trainer.rank


paceline.spawn(train, 2, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

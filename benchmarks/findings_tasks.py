"""The task of benchmarks/findings.py: a small model into which faults can be planted by its fields."""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Layout, Task


def is_rank(rank: int) -> bool:
    return int(os.environ.get("RANK", "0")) == rank


def compute(seconds: float) -> None:
    """Keep a core busy."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Samples:
    """Points with targets of a random teacher. A sample takes `sleep_s`, and `compute_s` of a core."""

    def __init__(self, task: "Planted", split: str):
        count = task.samples if split == "train" else task.validation
        draw = torch.Generator().manual_seed(count)
        self.task, self.sleep_s = task, task.sleep_s
        self.pages: Tensor | None = None
        self.read = 0
        self.known: set[int] = set()
        self.x = torch.randn(count, task.features, generator=draw)
        teacher = torch.randn(task.features, 3, generator=torch.Generator().manual_seed(0))
        self.y = torch.tanh(self.x @ teacher / task.features**0.5)
        self.y += task.noise * torch.randn(count, 3, generator=draw)
        if task.bad_samples and split == "train":
            self.y[torch.randperm(count, generator=draw)[: task.bad_samples]] *= 50.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.task.data_leak_MB:
            LEAKED.append(torch.ones(int(self.task.data_leak_MB * 2**18)))
        if self.task.mapped is not None:  # a part of a large file, whose pages stay in memory
            self.pages = self.pages if self.pages is not None else map_file(self.task.mapped)
            at = self.read % (len(self.pages) - PART)
            self.read += PART
            int(self.pages[at : at + PART].sum())
        if self.task.slow_rank < 0 or (self.task.slow_in == "data" and is_rank(self.task.slow_rank)):
            is_new = index not in self.known
            self.known.add(index)
            if self.sleep_s and index % self.task.slow_every == 0 and (is_new or not self.task.is_cached):
                time.sleep(self.sleep_s)
            if self.task.compute_s:
                compute(self.task.compute_s)
        return self.x[index], self.y[index]


class Slow(nn.Module):
    """A layer that takes some time in its forward pass, on one rank or on all.

    others_s  seconds on the other ranks"""

    def __init__(self, inner: nn.Module, seconds: float, rank: int, others_s: float):
        super().__init__()
        self.inner, self.seconds, self.rank, self.others_s = inner, seconds, rank, others_s

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds if self.rank < 0 or is_rank(self.rank) else self.others_s
        if seconds:
            time.sleep(seconds)
        return self.inner(x)


class Planted(Task):
    samples: int = 1600
    validation: int = 160
    features: int = 32
    width: int = 256
    depth: int = 4
    noise: float = 0.1
    sleep_s: float = 0.0
    compute_s: float = 0.0
    slow_every: int = 1  # of the samples
    slow_rank: int = -1  # all
    slow_in: str = "data"  # or "forward"
    slow_block: int = -1  # the block that takes forward_s
    forward_s: float = 0.0
    others_s: float = 0.0  # that the other ranks take, if one is slow
    is_cached: bool = False  # only the first reading of a sample is slow
    heavy_block: int = -1  # the block that computes more than the others
    bad_samples: int = 0
    leak_MB: float = 0.0  # per call of the loss
    data_leak_MB: float = 0.0  # per sample
    mapped: str | None = None  # a file that samples read
    jump_at: int = 0  # call of the loss from which losses are 4 times as large, with their noise; 0: none
    dead: bool = False  # no gradient reaches the weights
    zero: bool = False  # a loss of zero
    spike_at: int = 0  # call of the loss from which 6 losses are 30 times as large; 0: none
    falls_in: int = 0  # calls after which no gradient reaches the weights; 0: never
    is_reversed: bool = False  # the gradient has the wrong sign
    dropout: float = 0.0

    def model(self) -> nn.Module:
        def block(number: int) -> nn.Module:
            hidden = HEAVY if number == self.heavy_block else self.width
            layers = [nn.Linear(self.width, hidden), nn.Tanh(), nn.Linear(hidden, self.width)]
            inner = nn.Sequential(*layers, *([nn.Dropout(self.dropout)] if self.dropout else []))
            slow = self.slow_in == "forward" and (self.slow_block in (-1, number)) and self.forward_s > 0
            seconds = self.forward_s if slow and (number == 0 or self.slow_block >= 0) else 0.0
            return Slow(inner, seconds, self.slow_rank, self.others_s if seconds else 0.0)

        blocks = [block(number) for number in range(self.depth)]
        head = nn.Linear(self.width, 3)
        return nn.Sequential(nn.Linear(self.features, self.width), nn.Sequential(*blocks), head)

    def layout(self) -> Layout:
        return Layout(blocks=("1",))

    def dataset(self, split: str) -> Samples | None:
        return Samples(self, split) if split == "train" or self.validation else None

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.leak_MB:
            LEAKED.append(torch.ones(int(self.leak_MB * 2**18)))
        losses = F.mse_loss(output, batch[1], reduction="none").mean(-1)
        if output.requires_grad:
            CALLS.append(0)
        if self.spike_at and self.spike_at <= len(CALLS) < self.spike_at + 6:
            losses = losses * 30
        if self.jump_at and self.jump_at <= len(CALLS):
            losses = losses * 4 + 1
        if self.is_reversed:
            losses = 2.0 * losses.detach() - losses
        if self.falls_in and self.falls_in <= len(CALLS):
            losses = losses.detach() + 0.0 * losses
        if self.dead:
            losses = losses + 2.0
            losses = losses.detach() + 0.0 * losses
        return losses * 0.0 if self.zero else losses


PART = 2**17  # bytes of the mapped file that a sample reads


def map_file(path: str) -> Tensor:
    return torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)


HEAVY = 4096  # hidden units
LEAKED: list[Tensor] = []
CALLS: list[int] = []

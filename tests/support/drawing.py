"""Tasks that draw random numbers through `rng`, and an oracle that computes these numbers by itself."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from models import SAMPLES, Rows, random_integers, random_normal
from paceline import SampleRng, Task

WORDS = 2**64


class Vae(Task):
    """A model whose input and latent are noisy, and whose loss drops items."""

    def model(self) -> nn.Module:
        layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        for parameter in layers.parameters():
            nn.init.constant_(parameter, 0.0)
            with torch.no_grad():
                parameter.add_(
                    torch.arange(parameter.numel(), dtype=torch.float32).sin().view_as(parameter) / 2
                )
        return layers

    def dataset(self, split: str) -> Rows:
        count = SAMPLES if split == "train" else 11
        return Rows(x=random_normal(count, 5), y=random_normal(count, 3, seed=1))

    def inputs(self, batch: Any, rng: SampleRng) -> Tensor:
        return batch["x"] + 0.1 * rng.randn(5)

    def loss(self, output: Tensor, batch: Any, rng: SampleRng) -> Tensor:
        mean, log_var = output.chunk(2, -1)
        z = mean + (log_var / 2).exp() * rng.randn_like(mean)
        return (z - batch["y"]).square() * rng.bernoulli(0.7, 3)

    def metrics(self, output: Tensor, batch: Any, rng: SampleRng) -> dict[str, Tensor]:
        return {"draw": rng.rand(), "shared": rng.stream("shared").randint(0, 9)}


class Masked(models.Text):
    """Masked tokens: inputs and weights draw the same mask."""

    def model(self) -> nn.Module:
        model = models.Gpt()
        for block in model.blocks:
            block.mlp = nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Linear(14, 6))  # tp=2 divides 14
        return model

    def dataset(self, split: str) -> Rows:
        lengths = torch.arange(SAMPLES) * 5 % 9
        return Rows(tokens=random_integers(11, SAMPLES, 9), mask=torch.arange(8) < lengths[:, None])

    def inputs(self, batch: Any, rng: SampleRng) -> dict[str, Tensor]:
        return {"tokens": batch["tokens"][:, :-1].masked_fill(self.choose(rng), 0)}

    def weights(self, batch: Any, rng: SampleRng) -> Tensor:
        return batch["mask"] & self.choose(rng)

    def loss(self, output: Tensor, batch: Any, rng: SampleRng) -> Tensor:
        losses = F.cross_entropy(output.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")
        return losses * (1 + rng.rand(8))

    def choose(self, rng: SampleRng) -> Tensor:
        return rng.stream("mask").bernoulli(0.5, 8)


class Undeclared(Vae):
    """Draws in its loss from torch's stream, which belongs to the rank."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:  # type: ignore[override]
        mean, log_var = output.chunk(2, -1)
        return (mean + (log_var / 2).exp() * torch.randn_like(mean) - batch["y"]).square()


class Oracle:
    """The random numbers of one sample, in Python's integers."""

    def __init__(self, number: int, seed: int, name: str):
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
        keys = (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))
        self.states = [splitmix(number * 0x9E3779B97F4A7C15 + key) for key in keys]
        self.call = -1

    def words(self) -> Iterator[int]:
        self.call += 1
        for at in range(2**32):
            counter = (self.call * 2**32 + at) * 0x9E3779B97F4A7C15
            yield splitmix(splitmix(self.states[0] + counter) ^ self.states[1])

    def halves(self, count: int) -> tuple[list[int], list[int]]:
        words = [word for word, _ in zip(self.words(), range((count + 1) // 2), strict=False)]
        return [word >> 32 for word in words], [word % 2**32 for word in words]

    def rand(self, count: int) -> np.ndarray:
        high, low = self.halves(count)
        return np.array((high + low)[:count]) / 2**32

    def randn(self, count: int) -> np.ndarray:
        pairs = list(zip(*self.halves(count), strict=True))
        radii = [math.sqrt(-2 * math.log((high + 0.5) / 2**32)) for high, _ in pairs]
        angles = [2 * math.pi * low / 2**32 for _, low in pairs]
        return np.array(
            [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
            + [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
        )[:count]


def splitmix(z: int) -> int:
    """Return the output function of splitmix64."""
    z %= WORDS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORDS
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORDS
    return z ^ z >> 31

"""Base tasks of the zoo: random samples by kind of data. They mention no model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from paceline import Task

SAMPLES = 96
VOCABULARY, LENGTH = 48, 16
CLASSES, CHANNELS, SIDE = 10, 3, 16


class RandomSamples:
    """Random samples; the index of a sample is its seed."""

    def __init__(self, make: Callable[[Generator], Any]):
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(Generator().manual_seed(index))


class Synthetic(Task):
    """A task whose training samples `make` draws."""

    def make(self, generator: Generator) -> Any:
        raise NotImplementedError

    def dataset(self, split: str) -> RandomSamples | None:
        return RandomSamples(self.make) if split == "train" else None


def read_logits(output: Any) -> Tensor:
    """Return the logits of an output of transformers, or the output itself."""
    return getattr(output, "logits", output)


class Tokens(Synthetic):
    """Predict the next token."""

    width: int = 32
    depth: int = 2
    heads: int = 4

    def make(self, generator: Generator) -> Any:
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    def loss(self, output: Any, batch: Any) -> Any:
        logits = read_logits(output)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view_as(batch[1])


class Images(Synthetic):
    """Classify images."""

    width: int = 16
    side: int = SIDE

    def make(self, generator: Generator) -> Any:
        image = torch.randn(CHANNELS, self.side, self.side, generator=generator)
        return image, torch.randint(CLASSES, (), generator=generator)

    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(read_logits(output), batch[1], reduction="none")


class Dense(Synthetic):
    """Predict some numbers from others."""

    features: int = 8
    targets: int = 3
    width: int = 32

    def make(self, generator: Generator) -> Any:
        return torch.randn(self.features, generator=generator), torch.randn(self.targets, generator=generator)

    def loss(self, output: Any, batch: Any) -> Any:
        return (output - batch[1]).square()


class Pictures(Synthetic):
    """Images without labels, for models that generate them."""

    width: int = 16
    side: int = 8

    def make(self, generator: Generator) -> Any:
        return torch.rand(1, self.side, self.side, generator=generator)


class Series(Synthetic):
    """Predict the next values of a series."""

    width: int = 16
    variables: int = 3

    def make(self, generator: Generator) -> Any:
        series = torch.randn(LENGTH + 1, self.variables, generator=generator).cumsum(0)
        return series[:-1], series[1:]

    def loss(self, output: Any, batch: Any) -> Any:
        return (output - batch[1]).square()

"""Handwritten digits: 1,797 real images of 8×8 pixels, shipped with the package, and a small CNN."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task

FILE = Path(__file__).with_name("digits.npz")  # its licence: digits.license.txt
VALIDATION = 5  # every fifth image is for validation


class Images:
    """Images and labels in memory. `batch_of` returns a whole batch at once."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def batch_of(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], self.labels[chosen]


@lru_cache
def load() -> tuple[Tensor, Tensor]:
    """Return the images, float32 of shape (1797, 1, 8, 8) from 0 to 1, and the labels, int64 of (1797,).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits,
    UCI Machine Learning Repository, 1998 (test set).
    """
    with np.load(FILE) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return images.unsqueeze(1).float() / 16, labels.long()


class Digits(Task):
    """Classification of handwritten digits by a small CNN."""

    width: int = 32  # channels of the first convolution

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * self.width * 16, 4 * self.width),
            nn.ReLU(),
            nn.Linear(4 * self.width, 10),
        )

    def dataset(self, split: str) -> Images:
        images, labels = load()
        chosen = (torch.arange(len(labels)) % VALIDATION == 0) == (split == "validation")
        return Images(images[chosen], labels[chosen])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}

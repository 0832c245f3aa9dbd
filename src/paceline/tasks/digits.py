"""Handwritten digits: the 1,797 real images of 8×8 pixels that scikit-learn brings along, and a small CNN."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.errors import DataError

VALIDATION = 5  # each fifth image is kept for validation


class Images:
    """Images and labels in memory. `batch_of` fetches a batch in one go."""

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
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits task takes its images from scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


class Digits(Task):
    width: int = 32

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

"""Handwritten digits: the 1,797 real images of 8×8 pixels that scikit-learn brings along, and a small CNN."""

import gzip
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
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
    """The file is read as it lies in scikit-learn: to import that would take each rank a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("the digits task takes its images from scikit-learn: pip install scikit-learn")
    path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    if not path.exists():
        raise DataError(f"the digits task takes its images from scikit-learn, and this one has no {path}; use --constraint constraints.txt")
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()


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

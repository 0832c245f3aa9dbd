"""Classify images of handwritten digits with a custom CNN.

paceline train image_classification.py --ranks 2 --epochs 2 --lr 1e-2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Layout, Task
from paceline.tasks.digits import load


class Block(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, channels: int, dropout: float):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden_BCHW = F.relu(self.norm1(self.first(x_BCHW)))
        return F.relu(x_BCHW + self.norm2(self.second(self.dropout(hidden_BCHW))))


class Cnn(nn.Module):
    def __init__(self, channels: int, depth: int, dropout: float):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels, dropout) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(images_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits_BC: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BC


class Images:
    """Images with labels. Training images are shifted at random, equally on any number of ranks."""

    def __init__(self, images: Tensor, labels: Tensor, shift: bool):
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.shift:
            image = image.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2))
        return image, self.labels[index]


class Digits(Task):
    channels: int = 16  # a field is a hyperparameter: --set channels=32
    depth: int = 2
    dropout: float = 0.1

    def model(self) -> nn.Module:
        return Cnn(self.channels, self.depth, self.dropout)

    def layout(self) -> Layout:  # the units that plans shard and divide into pipeline stages
        return Layout(blocks=("blocks",))

    def dataset(self, split: str) -> Images:
        images, labels = load()
        part = slice(None, 1437) if split == "train" else slice(1437, None)
        return Images(images[part], labels[part], shift=split == "train")

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:  # one value per sample
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}

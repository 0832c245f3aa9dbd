"""CIFAR-10 and CIFAR-100 from their binary files in the folder of --set folder=PATH; a residual network."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import SampleRng, Task
from paceline.data import transforms
from paceline.errors import DataError
from paceline.tasks.digits import Images

PIXELS = 3 * 32 * 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)  # of the training images of CIFAR-10


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, width: int, new_width: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(width, new_width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(new_width, new_width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(new_width), nn.BatchNorm2d(new_width)
        is_same = width == new_width and stride == 1
        self.skip = nn.Identity() if is_same else nn.Conv2d(width, new_width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(inner)) + self.skip(x))


def read_images(path: Path, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return the images, float32 of shape (n, 3, 32, 32) from 0 to 1, and the last of the labels of each.

    Format: for each image its labels, one byte each, and the bytes of its red, green and blue pixels. Raises
    DataError.
    """
    try:
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; download the binary version") from error
    if not content.size or content.size % (num_labels + PIXELS):
        raise DataError(
            f"{path} has {content.size:,} bytes, not a multiple of the {num_labels + PIXELS:,} of an image;"
            " download it again"
        )
    rows = torch.from_numpy(content.reshape(-1, num_labels + PIXELS).copy())
    return rows[:, num_labels:].reshape(-1, 3, 32, 32).float() / 255, rows[:, num_labels - 1].long()


class Cifar10(Task):
    """Classification of images of 32 × 32 pixels by a residual network, with random crops and mirroring."""

    FILES: ClassVar = {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "validation": ("test_batch.bin",),
    }
    LABELS: ClassVar = 1  # bytes before each image
    CLASSES: ClassVar = 10

    folder: str  # folder of the .bin files
    width: int = 32  # channels of the first of three stages
    depth: int = 3  # blocks of each stage
    cutmix: float = 0.0  # alpha of CutMix; 0: none

    def model(self) -> nn.Module:
        width, blocks = self.width, []
        for stage in range(3):
            for block in range(self.depth):
                is_new = stage > 0 and block == 0
                blocks.append(Residual(width, width * (2 if is_new else 1), 2 if is_new else 1))
                width *= 2 if is_new else 1
        stem = (nn.Conv2d(3, self.width, 3, padding=1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU())
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, self.CLASSES))
        return nn.Sequential(*stem, *blocks, *head)

    def dataset(self, split: str) -> Images | None:
        if split not in self.FILES:
            return None
        parts = [read_images(Path(self.folder) / name, self.LABELS) for name in self.FILES[split]]
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if int(labels.max()) >= self.CLASSES:
            raise DataError(
                f"{self.folder} has the label {int(labels.max())}, but there are {self.CLASSES} classes;"
                " use the task cifar100 for files of CIFAR-100"
            )
        return Images(images, labels)

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        images = transforms.random_flip(transforms.random_crop(batch[0], rng, 32, padding=4), rng)
        if self.cutmix:
            return transforms.cutmix(images, batch[1], rng, self.cutmix, self.CLASSES)
        return images, batch[1]

    def inputs(self, batch: Any) -> Tensor:
        return transforms.normalize(batch[0], MEAN, STD)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        targets = batch[1].to(output.dtype) if batch[1].is_floating_point() else batch[1]
        return F.cross_entropy(output, targets, reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}


class Cifar100(Cifar10):
    """CIFAR-100 with its fine labels."""

    FILES: ClassVar = {"train": ("train.bin",), "validation": ("test.bin",)}
    LABELS: ClassVar = 2
    CLASSES: ClassVar = 100

"""Classification of images in class folders, as files or packed: --set folder=PATH."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import SampleRng, Task
from paceline.data import Folder, transforms
from paceline.data.folder import list_classes
from paceline.errors import DataError
from paceline.tasks.image_models import build_image_model

SPLITS = {"train": ("train",), "validation": ("validation", "val")}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images of ImageNet


class ImageFolder(Task):
    """Classification of the images in FOLDER/train/CLASS and FOLDER/val/CLASS.

    Training images are random parts, mirrored at random; others are resized and cut out of the middle.
    """

    folder: str  # has the folders train and val (or validation), with a folder for each class
    arch: str = "resnet50"  # resnet18 …, efficientnet_b0 …, timm:NAME or torchvision:NAME
    size: int = 224  # height and width of the images for the model
    mixup: float = 0.0  # alpha of mixup; 0: none
    jitter: float = 0.0  # largest change of brightness, contrast and saturation
    smoothing: float = 0.1  # of the labels

    def model(self) -> nn.Module:
        return build_image_model(self.arch, len(self.classes))

    @cached_property
    def classes(self) -> list[str]:
        """The names of the class folders of the training split."""
        found = list_classes(self._find("train"))
        if not found:
            problem = "no such folder: " if found is None else "there are no class folders in "
            raise DataError(f"{problem}{self._find('train')}; specify the folder of train: --set folder=PATH")
        return found

    def _find(self, split: str) -> Path:
        paths = [Path(self.folder) / name for name in SPLITS.get(split, (split,))]
        return next((path for path in paths if list_classes(path) is not None), paths[-1])

    def dataset(self, split: str) -> Folder | None:
        folder = self._find(split)
        if split != "train" and list_classes(folder) is None:
            return None
        return Folder(folder, classes=self.classes)

    def transform(self, sample: Any, rng: SampleRng) -> Any:
        image, label = sample
        return transforms.random_resized_crop(image[None], rng, self.size)[0], label

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        images = [
            image if image.shape[1:] == (self.size, self.size) else self._cut(image) for image, _ in samples
        ]
        return torch.stack(images).float() / 255, torch.tensor([label for _, label in samples])

    def _cut(self, image: Tensor) -> Tensor:
        return transforms.center_crop(transforms.resize(image[None], self.size * 8 // 7), self.size)[0]

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        images, labels = transforms.random_flip(batch[0], rng), batch[1]
        if self.jitter:
            images = transforms.color_jitter(images, rng, self.jitter, self.jitter, self.jitter)
        if self.mixup:
            return transforms.mixup(images, labels, rng, self.mixup, len(self.classes))
        return images, labels

    def inputs(self, batch: Any) -> Tensor:
        return transforms.normalize(batch[0], MEAN, STD)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        targets = batch[1].to(output.dtype) if batch[1].is_floating_point() else batch[1]
        return F.cross_entropy(output, targets, reduction="none", label_smoothing=self.smoothing)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}

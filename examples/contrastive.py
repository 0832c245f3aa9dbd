"""Learn embeddings of images without labels: the views of an image attract, those of others repel.

paceline train contrastive.py --ranks 2 --plan zero2 --epochs 10 --batch 128 --lr 1e-2
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.tasks.digits import load


class Encoder(nn.Module):
    """Embeds two views of each image. The temperature is learned, as in CLIP."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, width),
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = (F.normalize(self.layers(view), dim=-1) for view in (first, second))
        return *embedded, self.log_scale.exp()


class Views:
    """Two views of each image, shifted and noisy. They are the same on any number of ranks."""

    def __init__(self, images: Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        shifts = torch.randint(-1, 2, (2, 2)).tolist()
        first, second = (image.roll(tuple(shift), (1, 2)) for shift in shifts)
        return first + 0.2 * torch.randn_like(image), second + 0.2 * torch.randn_like(image)


class Contrastive(Task):
    width: int = 16

    def model(self) -> nn.Module:
        return Encoder(self.width)

    def inputs(self, batch: list[Tensor]) -> list[Tensor]:
        return batch  # both views

    def dataset(self, split: str) -> Views:
        images, _ = load()
        return Views(images[:1408] if split == "train" else images[1408:1792])

    def global_loss(self, output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> Tensor:
        """Return InfoNCE over all pairs of the global batch, whatever ranks and micro-batches divide it."""
        first, second, scale = output
        similarity_BB = scale * first @ second.T
        targets_B = torch.arange(len(similarity_BB), device=similarity_BB.device)
        return (F.cross_entropy(similarity_BB, targets_B) + F.cross_entropy(similarity_BB.T, targets_B)) / 2

    def metrics(self, output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> dict[str, Tensor]:
        return {"alignment": (output[0] * output[1]).sum(-1)}  # one value per sample

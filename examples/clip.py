"""Learn from captions, as CLIP does: an image and its caption get similar embeddings.

paceline train clip.py --ranks 2 --plan ddp --epochs 8 --batch 64 --lr 1e-4
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.tasks.digits import load

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
LENGTH = 20  # bytes of a caption


class Tower(nn.Module):
    """A transformer of an image or a text. `embed` makes vectors of shape (batch, positions, width)."""

    def __init__(self, embed: nn.Module, positions: int, width: int, depth: int):
        super().__init__()
        self.embed, self.positions = embed, nn.Parameter(0.02 * torch.randn(positions, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, **options) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        hidden_BPW = self.embed(values) + self.positions
        for block in self.blocks:
            hidden_BPW = block(hidden_BPW)
        return F.normalize(self.head(self.norm(hidden_BPW.mean(1))), dim=-1)


class Model(nn.Module):
    def __init__(self, width: int, depth: int):
        super().__init__()
        self.images = Tower(nn.Linear(4, width), 16, width, depth)  # patches of 2 × 2 pixels
        self.texts = Tower(nn.Embedding(128, width), LENGTH, width, depth)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images_BCHW: Tensor, text_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patches_BPV = F.unfold(images_BCHW, 2, stride=2).transpose(1, 2)
        return self.images(patches_BPV), self.texts(text_BL), self.log_scale.exp()


class Clip(Task):
    width: int = 128
    depth: int = 4

    def model(self) -> nn.Module:
        return Model(self.width, self.depth)

    def inputs(self, batch: list[Tensor]) -> list[Tensor]:
        return batch  # images and captions

    def dataset(self, split: str) -> list[tuple[Tensor, Tensor]]:
        """Return images, each shifted in a direction, and captions that name digit and direction."""
        images, labels = load()
        samples = []
        for index in range(1408) if split == "train" else range(1408, 1792):
            direction = [*MOVES][index % len(MOVES)]
            caption = f"a {NAMES[labels[index]]}, moved {direction}".ljust(LENGTH).encode()
            samples.append((images[index].roll(MOVES[direction], (1, 2)), torch.tensor([*caption])))
        return samples

    def global_loss(self, output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> Tensor:
        """Return CLIP's loss over the global batch, where images may share a caption."""
        images_BW, texts_BW, scale = output
        is_same_BB = (batch[1][:, None] == batch[1]).all(-1)
        targets_BB = is_same_BB / is_same_BB.sum(1, keepdim=True)
        similarity_BB = scale * images_BW @ texts_BW.T
        return (F.cross_entropy(similarity_BB, targets_BB) + F.cross_entropy(similarity_BB.T, targets_BB)) / 2

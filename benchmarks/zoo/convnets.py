"""Convolutional networks, written with torch alone."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from samples import CHANNELS, CLASSES, Images


def normed(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size, with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


def classifier(width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))) + self.shortcut(x))


class ResNet(Images):
    """ResNet-18's four stages of two blocks, with BatchNorm."""

    width: int = 4

    def model(self) -> nn.Module:
        widths = [self.width * factor for factor in (1, 1, 2, 4, 8)]
        return nn.Sequential(
            nn.Sequential(
                nn.Conv2d(CHANNELS, self.width, 3, 1, 1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU()
            ),
            *(
                Residual(inputs if block == 0 else outputs, outputs, 2 if block == 0 and stage else 1)
                for stage, (inputs, outputs) in enumerate(pairwise(widths))
                for block in range(2)
            ),
            classifier(widths[-1]),
        )


class SqueezeExcite(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self, width: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    """A block of MobileNetV3: expand, convolve each channel, weigh the channels, project."""

    def __init__(self, inputs: int, hidden: int, outputs: int, size: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            normed(inputs, hidden, 1),
            nn.Hardswish(),
            normed(hidden, hidden, size, stride, groups=hidden),
            SqueezeExcite(hidden),
            nn.Hardswish(),
            normed(hidden, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV3(Images):
    def model(self) -> nn.Module:
        rows = [(8, 16, 8, 3, 1), (8, 24, 12, 3, 2), (12, 32, 12, 5, 1), (12, 32, 16, 5, 1)]
        return nn.Sequential(
            nn.Sequential(normed(CHANNELS, 8, 3, 2), nn.Hardswish()),
            *(InvertedResidual(*row) for row in rows),
            nn.Sequential(normed(16, 32, 1), nn.Hardswish(), classifier(32)),
        )


class DenseLayer(nn.Module):
    """Appends new channels to its input."""

    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class DenseNet(Images):
    def model(self) -> nn.Module:
        layers = [DenseLayer(8 + 4 * index, 4) for index in range(4)]
        return nn.Sequential(normed(CHANNELS, 8), *layers, nn.Sequential(nn.ReLU(), classifier(24)))


class Vgg(Images):
    """Convolutions without norms, and linear layers with dropout."""

    def model(self) -> nn.Module:
        convolutions = [
            layer
            for inputs, outputs in pairwise((CHANNELS, 8, 16, 16))
            for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        head = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, CLASSES)]
        return nn.Sequential(*convolutions, *head)


class Inception(nn.Module):
    """Branches of several kernel sizes side by side."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.branches = nn.ModuleList(normed(inputs, width, size) for size in (1, 3, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), normed(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([*(branch(x) for branch in self.branches), self.pooled(x)], 1))


class GoogLeNet(Images):
    def model(self) -> nn.Module:
        blocks = [Inception(inputs, 4) for inputs in (8, 16, 16)]
        return nn.Sequential(normed(CHANNELS, 8, 3, 2), *blocks, classifier(16))


class Shuffle(nn.Module):
    """A unit of ShuffleNetV2: convolve half of the channels, then interleave both halves."""

    def __init__(self, width: int):
        super().__init__()
        half = width // 2
        self.layers = nn.Sequential(
            normed(half, half, 1),
            nn.ReLU(),
            normed(half, half, 3, groups=half),
            normed(half, half, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        return torch.stack([kept, self.layers(changed)], 2).flatten(1, 2)


class ShuffleNet(Images):
    def model(self) -> nn.Module:
        return nn.Sequential(normed(CHANNELS, 16, 3, 2), *(Shuffle(16) for _ in range(3)), classifier(16))


class Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Down three times, and up again with the features of each size."""

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise([inputs, *widths]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Double(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for index in (1, 0):
            x = self.up[index](torch.cat([self.grow[index](x), kept[index]], 1))
        return self.head(x)


class Segment(Images):
    """A U-Net that predicts a class for each pixel."""

    width: int = 8

    def model(self) -> nn.Module:
        return UNet(CHANNELS, self.width, CLASSES)

    def make(self, generator: Generator) -> Any:
        image = torch.randn(CHANNELS, self.side, self.side, generator=generator)
        return image, torch.randint(CLASSES, (self.side, self.side), generator=generator)


class SpectralCnn(Images):
    """A network whose weights are divided by their largest singular value."""

    def model(self) -> nn.Module:
        def normed_(layer: nn.Module) -> nn.Module:
            return nn.utils.parametrizations.spectral_norm(layer)

        return nn.Sequential(
            normed_(nn.Conv2d(CHANNELS, 8, 3, 2, 1)),
            nn.LeakyReLU(0.1),
            normed_(nn.Conv2d(8, 16, 3, 2, 1)),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            normed_(nn.Linear(256, 32)),
            nn.LeakyReLU(0.1),
            nn.Linear(32, CLASSES),
        )


class Capsules(nn.Module):
    """Vectors of capsules that agree by routing (Sabour, Frosst and Hinton, 2017)."""

    def __init__(self, inputs: int, size: int, routings: int):
        super().__init__()
        self.features = nn.Conv2d(CHANNELS, 16, 5, 2, 2)
        self.primary = nn.Conv2d(16, 16, 3, 2, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(inputs, CLASSES, size, 4))
        self.routings = routings

    def forward(self, x: Tensor) -> Tensor:
        primary = self.primary(F.relu(self.features(x))).unflatten(1, (4, 4)).flatten(3).permute(0, 1, 3, 2)
        votes = torch.einsum("ncdk,bnk->bncd", self.weight, squash(primary.flatten(1, 2)))
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(self.routings):
            capsules = squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * capsules.unsqueeze(1)).sum(-1)
        return capsules.norm(dim=-1)


def squash(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return x * square.sqrt() / (1 + square)


class CapsNet(Images):
    def model(self) -> nn.Module:
        return Capsules(64, 4, 2)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        wanted = F.one_hot(batch[1], CLASSES)
        return wanted * F.relu(0.9 - output).square() + 0.5 * (1 - wanted) * F.relu(output - 0.1).square()

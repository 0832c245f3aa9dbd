"""Models whose outputs depend only on the values before them, written with torch alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from samples import Dense, Pictures, Series


class MaskedConv(nn.Conv2d):
    """A convolution that sees only the pixels before a pixel (van den Oord et al., PixelCNN, 2016)."""

    def __init__(self, inputs: int, outputs: int, size: int, sees_itself: bool):
        super().__init__(inputs, outputs, size, padding=size // 2)
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + sees_itself :] = 0
        mask[size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCnn(Pictures):
    def model(self) -> nn.Module:
        inner = [layer for _ in range(2) for layer in (MaskedConv(8, 8, 3, True), nn.ReLU())]
        return nn.Sequential(MaskedConv(1, 8, 5, False), nn.ReLU(), *inner, nn.Conv2d(8, 1, 1))

    def make(self, generator: Generator) -> Tensor:
        return super().make(generator).round()

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch, reduction="none")


class MaskedLinear(nn.Linear):
    def __init__(self, mask: Tensor):
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Made(Dense):
    """A masked autoencoder for densities: output i depends on the inputs before i (Germain et al., 2015)."""

    def model(self) -> nn.Module:
        inputs, hidden = torch.arange(self.features), torch.arange(self.width) % (self.features - 1)
        masks = (hidden[:, None] >= inputs).float(), (inputs[:, None] > hidden).float()
        return nn.Sequential(MaskedLinear(masks[0]), nn.ReLU(), MaskedLinear(masks[1]))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[0]).square()


class WaveBlock(nn.Module):
    """A gated causal convolution with a residual and a skip (van den Oord et al., WaveNet, 2016)."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.conv, self.out = (
            nn.Conv1d(width, 2 * width, 2, dilation=dilation),
            nn.Conv1d(width, 2 * width, 1),
        )

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        residual, more = self.out(value.tanh() * gate.sigmoid()).chunk(2, 1)
        return x + residual, skip + more


class Waves(nn.Module):
    def __init__(self, variables: int, width: int):
        super().__init__()
        self.first, self.last = nn.Conv1d(variables, width, 1), nn.Conv1d(width, variables, 1)
        self.blocks = nn.ModuleList(WaveBlock(width, dilation) for dilation in (1, 2, 4))

    def forward(self, series: Tensor) -> Tensor:
        x = self.first(series.mT)
        skip = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x, skip)
        return self.last(F.relu(skip)).mT


class WaveNet(Series):
    def model(self) -> nn.Module:
        return Waves(self.variables, self.width)

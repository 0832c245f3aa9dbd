"""Predict damped oscillations with an LSTM. `collate` pads the series; `weights` masks the padding.

paceline train lstm.py --ranks 2 --epochs 5 --lr 1e-2
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from paceline import Task

Batch = dict[str, Tensor]


def make_series(count: int, seed: int) -> list[Tensor]:
    """Return oscillations of random frequency, phase and damping, between 9 and 41 values long."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 42, (count,), generator=draw)
    factors = torch.rand(count, 3, generator=draw)
    return [make_one(int(length), *row) for length, row in zip(lengths, factors.tolist(), strict=True)]


def make_one(length: int, frequency: float, phase: float, damping: float) -> Tensor:
    t = torch.arange(length)
    return torch.exp(-0.05 * damping * t) * torch.sin((0.2 + frequency) * t + 6.28 * phase)


class Lstm(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(1, width, layers, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x_BT: Tensor) -> Tensor:
        hidden_BTC, _ = self.lstm(x_BT.unsqueeze(-1))
        output_BT: Tensor = self.head(hidden_BTC).squeeze(-1)
        return output_BT


class Forecast(Task):
    width: int = 32
    layers: int = 2
    samples: int = 512

    def model(self) -> nn.Module:
        return Lstm(self.width, self.layers)

    def dataset(self, split: str) -> list[Tensor]:
        return make_series(self.samples, 0) if split == "train" else make_series(self.samples // 4, 1)

    def collate(self, samples: list[Tensor]) -> Batch:
        """Return series and next values, both of shape (batch, longest), and a mask that is 0 for padding."""
        padded = pad_sequence(samples, batch_first=True)
        mask = pad_sequence([torch.ones(len(series) - 1) for series in samples], batch_first=True)
        return {"x": padded[:, :-1], "next": padded[:, 1:], "mask": mask}

    def inputs(self, batch: Batch) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: Batch) -> Tensor:  # one value per time step
        return (output - batch["next"]).square()

    def weights(self, batch: Batch) -> Tensor:
        return batch["mask"]

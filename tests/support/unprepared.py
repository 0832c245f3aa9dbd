"""Small models with unusual properties, by name. No part of Paceline was written for them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models import Points


class Item(nn.Module):
    """Uses a computed value in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h * (1 + h.mean().item() * 0))


class Chosen(Item):
    """Some rows pass through a layer twice, as tokens pass through experts."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        rows = (h[:, 0] > 0).nonzero().squeeze(1)
        return self.last(h).index_add(0, rows, self.last(h[rows]))


class Packed(nn.Module):
    """Packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.middle, self.last = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, 0] > 0).long().cpu() + 2
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, None].expand(-1, 4, -1), lengths, batch_first=True, enforce_sorted=False
        )
        return self.last(self.middle(self.lstm(packed)[1][0][-1]).relu())


class Modulated(nn.Module):
    """The model calls a layer of a block from outside, as DiT does, and uses the weight of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Modulation() for _ in range(3)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        condition = x.sin()
        for block in self.blocks:
            scale = block.modulation(condition)
            x = x + block(x) * scale + block.weight
        return self.last(x)


class Modulation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(5, 5)
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Scaled(nn.Module):
    """A scalar temperature, as in CLIP, and an unused scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.last = nn.Linear(5, 3)
        self.logit_scale, self.idle = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x) * self.logit_scale.exp()


class Dropping(nn.Module):
    """Each sample skips some layers, depending on its values; all samples skip one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(6)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for at in (0, 1, 2, 4, 5):
            if float(x[0, at % 5]) < 0.5:
                h = self.blocks[at](h).tanh()
        return self.last(h)


class Idle(nn.Module):
    """One of three blocks is never called, and neither is a layer of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Linear(5, 5),
                nn.Linear(5, 5),
                nn.ModuleDict({"used": nn.Linear(5, 5), "idle": nn.Linear(5, 5)}),
            ]
        )
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[2]["used"](self.blocks[0](x).tanh()))


class Buffers(nn.Module):
    """Buffers: with two names, None until the first pass, a flag, a count, empty."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        scale = torch.arange(8.0) / 8
        self.register_buffer("scale", scale)
        self.register_buffer("again", scale)
        self.register_buffer("late", None if late else torch.ones(8), persistent=False)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = torch.ones(8, dtype=x.dtype)
        h = (self.first(x) * self.scale).tanh() * self.again * self.late
        return self.last(h * self.count if self.flag is not None else h)


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(5, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))


def _in_place(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "item": Item,
    "chosen": Chosen,
    "packed": Packed,
    "modulated": Modulated,
    "scaled": Scaled,
    "idle": Idle,
    "buffers": lambda: Buffers(late=False),
    "late buffer": lambda: Buffers(late=True),
    "cumulative batch norm": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3)
    ),
    "in place between": lambda: _in_place(
        nn.Linear(5, 8), nn.Hardswish(True), nn.Dropout(0.0, inplace=True), nn.Linear(8, 3)
    ),
    "in place behind": lambda: _in_place(
        nn.Linear(5, 8), nn.Hardswish(True), nn.Softmax(-1), nn.Linear(8, 3), nn.Hardsigmoid(True)
    ),
    "in place, gathered": lambda: _in_place(
        nn.Linear(5, 6), nn.Hardswish(True), nn.LayerNorm(6), nn.ReLU(True), nn.Linear(6, 3)
    ),
    "first weight norm": _normed(nn.utils.weight_norm),
    "first spectral norm": _normed(nn.utils.spectral_norm),
    "weight norm": _normed(nn.utils.parametrizations.weight_norm),
    "spectral norm": _normed(nn.utils.parametrizations.spectral_norm),
    "one weight norm": lambda: nn.Sequential(
        nn.utils.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "no linear layer": lambda: nn.Sequential(
        nn.LayerNorm(5), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten()
    ),
}
# Models whose result on a batch differs from that on its samples.
SAMPLE_BY_SAMPLE: dict[str, Callable[[], nn.Module]] = {"dropping": Dropping}


class Unprepared(Points):
    kind: str = "item"

    def model(self) -> nn.Module:
        return (MODELS | SAMPLE_BY_SAMPLE)[self.kind]()

"""Small tasks for the tests. Each has a property that could make a plan differ from one process."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Layout, Task
from paceline.data.order import shuffle
from paceline.tasks import text as tasks
from paceline.tasks.text import Windows

SAMPLES = 29  # a prime, so that each step starts at another position of the epoch


class Rows:
    """A data set whose samples are dicts of the rows of named tensors."""

    def __init__(self, **columns: Tensor):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Pairs(Rows):
    """A data set whose samples are tuples of the rows of tensors."""

    def __getitem__(self, index: int) -> Any:
        return tuple(super().__getitem__(index).values())


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


class Points(Task):
    """Regression with three loss items per sample. No size is divisible by 2 or 4."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3))

    def dataset(self, split: str) -> Pairs | None:
        return (
            Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1))
            if split == "train"
            else None
        )

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()


class Images(Task):
    """A CNN with odd numbers of channels."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 5, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(45, 7),
        )

    def dataset(self, split: str) -> Pairs:
        size = SAMPLES if split == "train" else 11
        return Pairs(x=random_normal(size, 1, 8, 8), y=random_integers(7, size))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}


class NormedImages(Images):
    """A CNN with BatchNorm, whose statistics are those of a whole micro-batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(108, 7, bias=False),
            nn.BatchNorm1d(7),
        )


class UntrackedNorm(Images):
    """A CNN with BatchNorm that has no running statistics, so that metrics would depend on the batches."""

    def dataset(self, split: str) -> Any:
        return super().dataset(split) if split == "train" else None

    def model(self) -> nn.Module:
        norm = nn.BatchNorm2d(3, track_running_stats=False)
        return nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), norm, nn.Tanh(), nn.Flatten(), nn.Linear(108, 7))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # No bias: the gradient of a bias of the keys is 0 up to rounding, and Adam divides it by itself.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 11, width: int = 6, depth: int = 3):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class Text(Task):
    """Tied weights, dicts and masked targets, whose number differs between ranks and micro-batches."""

    def model(self) -> nn.Module:
        return Gpt()

    def dataset(self, split: str) -> Rows | None:
        lengths = torch.arange(SAMPLES) * 5 % 9
        return (
            Rows(tokens=random_integers(11, SAMPLES, 9), mask=torch.arange(8) < lengths[:, None])
            if split == "train"
            else None
        )

    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["tokens"][:, :-1]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return batch["mask"]


class ShortText(tasks.Text):
    """The built-in GPT on a short text."""

    width: int = 16
    depth: int = 2
    context: int = 8

    def dataset(self, split: str) -> Any:
        windows = super().dataset(split)
        return Windows(windows.text[: 8 * (SAMPLES if split == "train" else 11) + 1], self.context)


class ScalarText(Text):
    """The loss of Text, but the task computes the weighted mean."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        weights = batch["mask"]
        return (super().loss(output, batch) * weights).sum() / weights.sum().clamp(min=1)


class Scalar(Points):
    """A scalar loss: the mean over the samples."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1])


class Frozen(Points):
    """Some parameters are frozen: a whole layer, and the bias of another layer."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2].requires_grad_(False)
        model[4].bias.requires_grad_(False)
        return model


class Idle(Points):
    """Some parameters get no gradient. Weight decay and momentum skip None, but would use a gradient of 0."""

    def model(self) -> nn.Module:
        return Partly()


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.out = nn.Linear(5, 3)
        self.spare = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 2:
                x = block(x).tanh()
        return self.out(x)


class Unread(Points):
    """A pass uses some parameters only for an output that the loss does not read."""

    def model(self) -> nn.Module:
        return Pooled()

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output["scores"], batch)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.out, self.pooler = nn.Linear(5, 3), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        return {"scores": self.out(x), "pooled": self.pooler(x).tanh()}


class Weighed(Points):
    """Item weights that are not masks. Some samples have only zero weights."""

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        weights = random_normal(SAMPLES, 3, seed=2).abs() * (torch.arange(SAMPLES) % 4 > 0)[:, None]
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1), weight=weights)

    def weights(self, batch: Any) -> Tensor:
        return batch[2]


class OwnOptimizer(Points):
    """A custom optimizer with different parameter groups."""

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params = dict(params)
        groups = [
            {"params": [p for name, p in params.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in params.items() if name.endswith("bias")], "lr": 0.1},
        ]
        return torch.optim.Adam(groups, lr=1e-2, betas=(0.8, 0.9), amsgrad=True)


class Backbone(Points):
    """A custom optimizer whose parameter groups are layers, and so stages of a pipeline."""

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params = dict(params)
        groups = [
            {"params": [p for name, p in params.items() if name.startswith("0")], "name": "first"},
            {
                "params": [p for name, p in params.items() if not name.startswith("0")],
                "name": "others",
                "lr": 0.1,
            },
        ]
        return torch.optim.Adam(groups, lr=1e-2)


class Shared(Points):
    """A block that is used twice. The layout names the blocks."""

    def model(self) -> nn.Module:
        return Twice()

    def layout(self) -> Layout:
        return Layout(blocks=("inner", "out"))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.inner(x)))


class Routed(Points):
    """Each sample goes to one of two experts. In the first step, the last ranks have none for the second."""

    def model(self) -> nn.Module:
        return Experts()

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        to = torch.zeros(SAMPLES, dtype=torch.long)
        to[shuffle(np.arange(SAMPLES), SAMPLES, 3)] = (torch.arange(SAMPLES) % 8 == 1).long()
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1), to=to)

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[2]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(2)])

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        x = self.first(x).tanh()
        out = x.new_zeros(len(x), 3)
        for expert in to.unique().tolist():
            out = out.index_put((to == expert,), self.experts[expert](x[to == expert]))
        return out


class Unrecorded(Points):
    """A model that must be built whole: its constructor reads values and keeps an unregistered tensor."""

    def model(self) -> nn.Module:
        return Blends()


class Blends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0.5, 1, 3)]
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in rates])
        self.rates = torch.tensor(rates)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for rate, block in zip(self.rates, self.blocks, strict=True):
            x = x + rate * block(x).tanh()
        return self.out(x)


class Temperature(Points):
    """A model with a scalar parameter."""

    def model(self) -> nn.Module:
        return Divided()


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.temperature


class Tempered(Points):
    """A scalar parameter after layers that tensor parallelism can split."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5), Divided())


class Ragged(Points):
    """The number of loss items depends on the samples, and the task defines no weights."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()[batch[1] > 0]

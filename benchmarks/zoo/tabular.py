"""Networks for tables, fields and equations, written with torch alone."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from generative import mlp
from samples import Dense, Synthetic

FIELDS, VALUES = 4, 30  # categorical fields, and values of each


class Uneven(Dense):
    """An MLP whose sizes are all odd."""

    features: int = 5

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7)) for _ in range(5)]
        return nn.Sequential(nn.Linear(5, 7), *blocks, nn.LayerNorm(7), nn.Linear(7, 3))


class Linear(Dense):
    """Linear regression."""

    def model(self) -> nn.Module:
        return nn.Linear(self.features, self.targets)


class Clicks(Synthetic):
    """Predict clicks from numbers and categories."""

    width: int = 8

    def make(self, generator: Generator) -> Any:
        numbers = torch.randn(4, generator=generator)
        categories = torch.randint(VALUES, (FIELDS, 2), generator=generator)
        return numbers, categories, torch.randint(2, (), generator=generator).float()

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[2], reduction="none")


class Recommender(nn.Module):
    """Products of all pairs of embeddings and of the numbers (Naumov et al., DLRM, 2019)."""

    def __init__(self, width: int, sparse: bool):
        super().__init__()
        self.bottom = mlp(4, 16, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(VALUES, width, sparse=sparse) for _ in range(FIELDS))
        self.top = mlp((FIELDS + 1) * FIELDS // 2 + width, 16, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], 1)
        rows, columns = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        pairs = (vectors @ vectors.mT)[:, rows, columns]
        return self.top(torch.cat([dense, pairs], 1)).squeeze(-1)


class Dlrm(Clicks):
    """With sparse gradients, which SGD without momentum applies."""

    sparse: bool = True

    def model(self) -> nn.Module:
        return Recommender(self.width, self.sparse)

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return torch.optim.SGD([parameter for _, parameter in params], lr=0.1)


class Factors(nn.Module):
    """A linear model of the values, and products of their embeddings (Guo et al., DeepFM, 2017)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.embed = nn.Embedding(FIELDS * VALUES, 1), nn.Embedding(FIELDS * VALUES, width)
        self.deep = mlp(2 * FIELDS * width + 4, 16, 1)
        self.register_buffer("first", torch.arange(FIELDS)[:, None] * VALUES)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        indices = (categories + self.first).flatten(1)
        vectors = self.embed(indices)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], 1)).squeeze(-1)
        return self.linear(indices).sum((1, 2)) + pairs + deep


class DeepFm(Clicks):
    def model(self) -> nn.Module:
        return Factors(self.width)


class CrossLayer(nn.Module):
    """x0 · (W x + b) + x (Wang et al., DCN-V2, 2021)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x


class Crossed(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        inputs = FIELDS * width + 4
        self.embed = nn.EmbeddingBag(VALUES, width)
        self.crosses = nn.ModuleList(CrossLayer(inputs) for _ in range(2))
        self.head = nn.Linear(inputs, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bags = self.embed(categories.flatten(0, 1)).unflatten(0, (len(categories), FIELDS))
        first = x = torch.cat([bags.flatten(1), numbers], 1)
        for cross in self.crosses:
            x = cross(first, x)
        return self.head(x).squeeze(-1)


class CrossNetwork(Clicks):
    def model(self) -> nn.Module:
        return Crossed(self.width)


class FieldAttention(nn.Module):
    """Attention among the fields of a row (Huang et al., TabTransformer, 2020)."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(VALUES, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = mlp(2 * FIELDS * width + 4, 16, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(categories.flatten(1)))
        return self.head(torch.cat([hidden.flatten(1), numbers], 1)).squeeze(-1)


class TabTransformer(Clicks):
    width: int = 16

    def model(self) -> nn.Module:
        return FieldAttention(self.width)


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return (3 * self.linear(x)).sin()


class Siren(Dense):
    """An image as a function of the coordinates, with sines (Sitzmann et al., 2020)."""

    features: int = 2

    def model(self) -> nn.Module:
        return nn.Sequential(Sine(2, 32), Sine(32, 32), Sine(32, 32), nn.Linear(32, 3))


class Radiance(nn.Module):
    """Colours and densities along rays, and their integrals (Mildenhall et al., NeRF, 2020)."""

    def __init__(self, frequencies: int = 4, points: int = 8):
        super().__init__()
        self.register_buffer("rates", math.pi * 2.0 ** torch.arange(frequencies))
        self.register_buffer("depths", torch.linspace(0.5, 2, points))
        self.body = mlp(6 * frequencies, 32, 32)
        self.density, self.colour = nn.Linear(32, 1), mlp(35, 16, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        points = origin[:, None] + direction[:, None] * self.depths[:, None]
        angles = (points[..., None] * self.rates).flatten(2)
        hidden = F.relu(self.body(torch.cat([angles.sin(), angles.cos()], -1)))
        opacity = 1 - (-F.softplus(self.density(hidden)).squeeze(-1) * self.depths.diff().mean()).exp()
        passed = torch.cat([torch.ones_like(opacity[:, :1]), (1 - opacity[:, :-1])], 1).cumprod(1)
        directions = direction[:, None].expand_as(points)
        colours = self.colour(torch.cat([hidden, directions], -1)).sigmoid()
        return ((passed * opacity)[..., None] * colours).sum(1)


class Nerf(Synthetic):
    def make(self, generator: Generator) -> Any:
        origin, direction = torch.randn(2, 3, generator=generator)
        return origin, F.normalize(direction, dim=0), torch.rand(3, generator=generator)

    def model(self) -> nn.Module:
        return Radiance()

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[2]).square()


class Physics(Dense):
    """A network that obeys u' = -u: the loss is the residual of the equation (Raissi et al., 2019)."""

    features: int = 1
    targets: int = 1

    def model(self) -> nn.Module:
        return Derivative()

    def loss(self, output: Any, batch: Any) -> dict[str, Tensor]:
        value, slope, start = output
        return {"equation": (slope + value).square(), "start": (start - 1).square()}


class Derivative(nn.Module):
    """Returns u(t), its derivative, and u(0)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            value = self.net(t)
            slope = torch.autograd.grad(value.sum(), t, create_graph=True)[0]
        return value, slope, self.net(torch.zeros_like(t))

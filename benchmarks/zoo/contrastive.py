"""Losses that compare the samples of a batch: they see the whole global batch."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from generative import mlp
from paceline.after_step import Ema, Polyak
from samples import CLASSES, Synthetic


class Views(Synthetic):
    """Two noisy views of each point."""

    width: int = 16

    def make(self, generator: Generator) -> Any:
        point = torch.randn(8, generator=generator)
        return tuple(point + 0.3 * torch.randn(8, generator=generator) for _ in range(2))

    def model(self) -> nn.Module:
        return Siamese(mlp(8, 32, self.width))

    def inputs(self, batch: Any) -> Any:
        return tuple(batch)


class Siamese(nn.Module):
    """One network for both views, and a learned temperature."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(first), self.encoder(second), self.log_scale.exp()


def match(first: Tensor, second: Tensor, scale: Tensor | float) -> Tensor:
    """Return the symmetric InfoNCE of two sets of embeddings; row i of both is sample i."""
    similarity = scale * F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
    targets = torch.arange(len(similarity), device=similarity.device)
    return (F.cross_entropy(similarity, targets) + F.cross_entropy(similarity.T, targets)) / 2


class InfoNce(Views):
    def global_loss(self, output: Any, batch: Any) -> Tensor:
        return match(*output)


class SimClr(Views):
    """All other views of the batch are negatives (Chen et al., NT-Xent, 2020)."""

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        views = F.normalize(torch.cat(output[:2]), dim=-1)
        similarity = output[2] * views @ views.T
        similarity = similarity.masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similarity, torch.arange(len(views)).roll(len(views) // 2))


class BarlowTwins(Views):
    """The correlation of the two views is the identity (Zbontar et al., 2021)."""

    def model(self) -> nn.Module:
        return Pair(mlp(8, 32, self.width))

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        first, second = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in output)
        correlation = first.T @ second / len(first)
        diagonal = correlation.diagonal()
        return (diagonal - 1).square().sum() + 0.01 * (correlation.square().sum() - diagonal.square().sum())


class Pair(nn.Module):
    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(first), self.encoder(second)


class VicReg(BarlowTwins):
    """Variance, invariance and covariance (Bardes, Ponce and LeCun, 2022)."""

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        loss = F.mse_loss(*output)
        for view in output:
            centered = view - view.mean(0)
            covariance = centered.T @ centered / (len(view) - 1)
            variance = covariance.diagonal()
            loss = loss + F.relu(1 - (variance + 1e-4).sqrt()).mean()
            loss = loss + 0.04 * (covariance.square().sum() - variance.square().sum()) / len(variance)
        return loss


class Bootstrapped(nn.Module):
    """A network that predicts what a slower copy of itself computes for another view."""

    def __init__(self, width: int):
        super().__init__()
        self.online = mlp(8, 32, width)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(width, width)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictor(self.online(first)), self.target(second)


class Byol(Views):
    """The weights of the target follow those of the online network (Grill et al., 2020)."""

    def model(self) -> nn.Module:
        return Bootstrapped(self.width)

    def loss(self, output: Any, batch: Any) -> Tensor:
        return 1 - F.cosine_similarity(*output)

    def after_step(self) -> Any:
        return [Polyak("online", "target", tau=0.05)]


class Distilled(nn.Module):
    """A fixed teacher and a student of the same inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(8, 64, CLASSES).requires_grad_(False)
        self.student = mlp(8, 16, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


class Distillation(Synthetic):
    """A student learns the outputs of a frozen teacher; evaluations use a moving average of its weights."""

    def make(self, generator: Generator) -> Any:
        return torch.randn(8, generator=generator)

    def model(self) -> nn.Module:
        return Distilled()

    def loss(self, output: Any, batch: Any) -> Tensor:
        student, teacher = output
        return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)

    def after_step(self) -> Any:
        return [Ema(decay=0.9, params="student.*")]


class Triplet(Synthetic):
    """Embeddings of one class are nearer than those of other classes: the hardest pairs of the batch."""

    margin: float = 0.5

    def make(self, generator: Generator) -> Any:
        label = torch.randint(4, (), generator=generator)
        return torch.randn(8, generator=generator) + label, label

    def model(self) -> nn.Module:
        return mlp(8, 32, 8)

    def global_loss(self, output: Tensor, batch: Any) -> Tensor:
        distances = (output[:, None] - output).square().sum(-1).add(1e-9).sqrt()
        same = batch[1][:, None] == batch[1]
        farthest = distances.masked_fill(~same, -torch.inf).amax(1)
        nearest = distances.masked_fill(same, torch.inf).amin(1)
        loss = F.relu(farthest - nearest + self.margin)
        return loss[nearest.isfinite()].sum() / len(loss)

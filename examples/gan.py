"""Generate digits with a generator that learns to deceive a critic: two optimizers, one after the other.

paceline train gan.py --ranks 2 --plan ddp --epochs 10 --batch 64
"""

import torch.nn.functional as F
from torch import Tensor, nn

from paceline import SampleRng, Task, Update
from paceline.spec import Optimizer
from paceline.tasks.digits import load

ADAM = Optimizer(lr=5e-4, betas=(0.5, 0.999))


class Adversaries(nn.Module):
    """Both networks are one model, so every plan distributes them together."""

    def __init__(self, width: int):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )
        self.critic = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
        )
        self.score = nn.Linear(width, 1)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the scores of generated images, and before them those of real images if there are any."""
        fake = self.generator(noise)
        if real is None:
            return self.score(self.critic(fake))
        return self.score(self.critic(real.flatten(1))), self.score(self.critic(fake.detach()))


class Images:
    def __init__(self, images: Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class Gan(Task):
    width: int = 128

    def model(self) -> nn.Module:
        return Adversaries(self.width)

    def dataset(self, split: str) -> Images:
        images, _ = load()
        return Images(images[:1408] if split == "train" else images[1408:1792])

    def updates(self) -> list[Update]:
        critic = ("critic.*", "score.*")
        return [
            Update("critic", critic, self.critic_loss, self.critic_inputs, optimizer=ADAM),
            Update("generator", "generator.*", self.generator_loss, self.noise, optimizer=ADAM),
        ]

    def noise(self, batch: Tensor, rng: SampleRng) -> Tensor:
        return rng.randn(16)  # belongs to the samples, so it is the same on any number of ranks

    def critic_inputs(self, batch: Tensor, rng: SampleRng) -> tuple[Tensor, Tensor]:
        return rng.randn(16), batch

    def critic_loss(self, output: tuple[Tensor, Tensor], batch: Tensor) -> Tensor:
        real, fake = output
        return F.softplus(-real) + F.softplus(fake)

    def generator_loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.softplus(-output)

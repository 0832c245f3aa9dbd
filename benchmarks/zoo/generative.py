"""Models that generate, written with torch alone."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import embed_time
from convnets import UNet
from paceline import BufferSum, Layout, Update
from paceline.spec import Optimizer
from samples import Dense, Pictures


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class AutoEncoder(Pictures):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *mlp(64, 32, 16, 4), nn.ReLU(), *mlp(4, 16, 32, 64))

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return (output - batch.flatten(1)).square()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 32, 16), mlp(8, 32, 64)

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(image.flatten(1)).chunk(2, -1)
        return self.decoder(mean + (log_var / 2).exp() * noise), mean, log_var


class Vae(Pictures):
    """The latent noise belongs to the samples."""

    def model(self) -> nn.Module:
        return Variational()

    def inputs(self, batch: Tensor, rng: Any) -> Any:
        return batch, rng.randn(8)

    def loss(self, output: Any, batch: Tensor) -> dict[str, Tensor]:
        logits, mean, log_var = output
        return {
            "reconstruction": F.binary_cross_entropy_with_logits(logits, batch.flatten(1), reduction="none"),
            "kl": (mean.square() + log_var.exp() - 1 - log_var).sum(1) / 2,
        }

    def loss_weights(self) -> dict[str, float]:
        return {"kl": 0.1}


class Codebook(nn.Module):
    """Codes that are moving averages of the vectors that they replace."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", torch.randn(size, width))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(z.detach(), codes).argmin(1)
        if self.training:
            members = F.one_hot(nearest, len(codes)).to(z.dtype)
            self.counts.mul_(0.99).add_(members.sum(0), alpha=0.01)
            self.sums.mul_(0.99).add_(members.T @ z.detach(), alpha=0.01)
        code = codes[nearest]
        return z + (code - z).detach(), (z - code).square().mean(1)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = mlp(64, 32, 8), Codebook(16, 8), mlp(8, 32, 64)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        code, distance = self.codebook(self.encoder(image.flatten(1)))
        return self.decoder(code), distance


class VqVae(Pictures):
    """The codebook changes in forward passes; its layout declares how."""

    def model(self) -> nn.Module:
        return Quantized()

    def loss(self, output: Any, batch: Tensor) -> dict[str, Tensor]:
        return {"reconstruction": (output[0] - batch.flatten(1)).square(), "commitment": output[1]}

    def layout(self) -> Layout:
        return Layout(buffers={"codebook.*": BufferSum(decay=0.99)})


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(8, 32, 64), mlp(64, 32, 1)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        if real is None:
            return self.critic(fake)
        return self.critic(real.flatten(1)), self.critic(fake.detach())


class Gan(Pictures):
    """Two optimizers, one after the other."""

    def model(self) -> nn.Module:
        return Adversaries()

    def updates(self) -> list[Update]:
        adam = Optimizer(lr=1e-3, betas=(0.5, 0.9))
        return [
            Update("critic", "critic.*", self.critic_loss, self.critic_inputs, optimizer=adam),
            Update("generator", "generator.*", self.generator_loss, self.noise, optimizer=adam),
        ]

    def noise(self, batch: Tensor, rng: Any) -> Tensor:
        return rng.randn(8)

    def critic_inputs(self, batch: Tensor, rng: Any) -> Any:
        return rng.randn(8), batch

    def critic_loss(self, output: Any, batch: Tensor) -> Tensor:
        return F.softplus(-output[0]) + F.softplus(output[1])

    def generator_loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return F.softplus(-output)


class Penalized(Adversaries):
    """Returns also the norm of the critic's gradient between real and generated images."""

    def forward(self, noise: Tensor, real: Tensor | None = None, blend: Tensor | None = None) -> Any:
        if real is None or blend is None:
            return super().forward(noise)
        fake, real = self.generator(noise).detach(), real.flatten(1)
        between = (real + blend * (fake - real)).requires_grad_()
        with torch.enable_grad():
            gradient = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)[0]
        return self.critic(real), self.critic(fake), gradient.norm(dim=1, keepdim=True)


class WganGp(Gan):
    """Wasserstein GAN with a penalty on the gradient (Gulrajani et al., 2017); the critic updates twice."""

    def model(self) -> nn.Module:
        return Penalized()

    def updates(self) -> list[Update]:
        return [
            Update("critic", "critic.*", self.critic_loss, self.critic_inputs, repeat=2),
            Update("generator", "generator.*", self.generator_loss, self.noise),
        ]

    def critic_inputs(self, batch: Tensor, rng: Any) -> Any:
        return rng.randn(8), batch, rng.rand(1)

    def critic_loss(self, output: Any, batch: Tensor) -> dict[str, Tensor]:
        return {"score": output[1] - output[0], "penalty": 10 * (output[2] - 1).square()}

    def generator_loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return -output


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(16, 4)
        self.unet = UNet(5, 8, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        condition = self.time(embed_time(time, 16))[:, :, None, None].expand(-1, -1, *image.shape[2:])
        return self.unet(torch.cat([image, condition], 1))


class Ddpm(Pictures):
    """Predict the noise in an image (Ho, Jain and Abbeel, 2020)."""

    def model(self) -> nn.Module:
        return Denoiser()

    def inputs(self, batch: Tensor, rng: Any) -> Any:
        shared = rng.stream("noise")
        time = shared.rand()
        signal = (time * math.pi / 2).cos()[:, None, None, None]
        return signal * batch + (1 - signal.square()).sqrt() * shared.randn_like(batch), time

    def loss(self, output: Tensor, batch: Tensor, rng: Any) -> Tensor:
        shared = rng.stream("noise")
        shared.rand()
        return (output - shared.randn_like(batch)).square()


class Coupling(nn.Module):
    """One half of the values scales and shifts the other half (Dinh, Sohl-Dickstein and Bengio, 2017)."""

    def __init__(self, width: int, flips: bool):
        super().__init__()
        self.net, self.flips = mlp(width // 2, 32, width), flips

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        if self.flips:
            first, second = second, first
        log_scale, shift = self.net(first).chunk(2, 1)
        log_scale = log_scale.tanh()
        parts = [first, second * log_scale.exp() + shift]
        return torch.cat(parts[::-1] if self.flips else parts, 1), log_det + log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(width, bool(index % 2)) for index in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = x.new_zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x, log_det)
        return x, log_det


class RealNvp(Dense):
    """A normalizing flow; the loss is the negative log-likelihood."""

    def model(self) -> nn.Module:
        return Flow(self.features)

    def loss(self, output: Any, batch: Any) -> Tensor:
        return output[0].square().sum(1) / 2 - output[1]

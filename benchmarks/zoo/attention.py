"""Networks of attention or mixing, written with torch alone."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from samples import CHANNELS, CLASSES, LENGTH, SIDE, VOCABULARY, Images, Synthetic, Tokens


class Encoder(nn.Module):
    """torch's encoder as used in its tutorials."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.token, self.position = (
            nn.Embedding(VOCABULARY, width),
            nn.Parameter(torch.randn(LENGTH, width) * 0.02),
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.size(1), device=tokens.device, dtype=self.position.dtype
        )
        return self.head(self.encoder(self.token(tokens) + self.position, mask=mask, is_causal=True))


class TransformerEncoder(Tokens):
    depth: int = 8
    heads: int = 8

    def model(self) -> nn.Module:
        return Encoder(self.width, self.depth, self.heads)


class EncoderDecoder(nn.Module):
    """torch's `nn.Transformer` with embeddings."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.transformer = nn.Transformer(width, heads, depth, depth, 2 * width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.size(1), device=target.device, dtype=self.position.dtype
        )
        embedded = (self.token(tokens) + self.position for tokens in (source, target))
        return self.head(self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=True))


class Transformer(Tokens):
    """The encoder and decoder of Vaswani et al., 2017."""

    def model(self) -> nn.Module:
        return EncoderDecoder(self.width, self.depth, self.heads)

    def inputs(self, batch: Any) -> Any:
        return batch[1], batch[0]


class Patches(nn.Module):
    """Images as sequences of patches."""

    def __init__(self, width: int, size: int = 4):
        super().__init__()
        self.project = nn.Conv2d(CHANNELS, width, size, size)

    def forward(self, image: Tensor) -> Tensor:
        return self.project(image).flatten(2).mT


class MixerBlock(nn.Module):
    """Mixes patches, then channels (Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self, patches: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Mixer(Images):
    def model(self) -> nn.Module:
        blocks = (MixerBlock((SIDE // 4) ** 2, self.width) for _ in range(2))
        return nn.Sequential(
            Patches(self.width), *blocks, nn.LayerNorm(self.width), Mean(), nn.Linear(self.width, CLASSES)
        )


class GatedMlpBlock(nn.Module):
    """Channels that gate one another by a mix of positions (Liu et al., gMLP, 2021)."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(u * self.mix(self.gate_norm(v).mT).mT)


class Gmlp(Images):
    def model(self) -> nn.Module:
        blocks = (GatedMlpBlock((SIDE // 4) ** 2, self.width) for _ in range(2))
        return nn.Sequential(Patches(self.width), *blocks, Mean(), nn.Linear(self.width, CLASSES))


class DitBlock(nn.Module):
    """A block whose norms a condition scales and shifts (Peebles and Xie, DiT, 2023)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scales = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = scales
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attended)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def embed_time(time: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times, shape (batch, width)."""
    rates = torch.exp(-math.log(1000) * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = 100 * time[:, None] * rates.to(time.dtype)
    return torch.cat([angles.sin(), angles.cos()], -1)


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.width = width
        self.patches = Patches(width)
        self.position = nn.Parameter(0.02 * torch.randn((SIDE // 4) ** 2, width))
        self.time = nn.Linear(width, width)
        self.label = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 16 * CHANNELS)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition = self.time(embed_time(time, self.width)) + self.label(label)
        x = self.patches(image) + self.position
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(x).unflatten(-1, (CHANNELS, 4, 4)).unflatten(1, (SIDE // 4, SIDE // 4))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class DiT(Images):
    """Predict the velocity from noise to image, as in flow matching."""

    width: int = 32

    def model(self) -> nn.Module:
        return DiffusionTransformer(self.width, 4, 2)

    def inputs(self, batch: Any, rng: Any) -> Any:
        shared = rng.stream("noise")
        time, noise = shared.rand(), shared.randn_like(batch[0])
        mixed = time[:, None, None, None] * batch[0] + (1 - time[:, None, None, None]) * noise
        return mixed, time, batch[1]

    def loss(self, output: Tensor, batch: Any, rng: Any) -> Tensor:
        shared = rng.stream("noise")
        shared.rand()
        return (output - (batch[0] - shared.randn_like(batch[0]))).square()


class SetTransformerModel(nn.Module):
    """Attention among the points of a set, then of learned seeds to the points (Lee et al., 2019)."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.among = nn.MultiheadAttention(width, 4, batch_first=True)
        self.seeds = nn.Parameter(torch.randn(1, 2, width))
        self.pool = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points)
        x = x + self.among(x, x, x, need_weights=False)[0]
        seeds = self.seeds.expand(len(x), -1, -1)
        return self.head(self.pool(seeds, x, x, need_weights=False)[0].flatten(1))


class SetTransformer(Synthetic):
    width: int = 16

    def model(self) -> nn.Module:
        return SetTransformerModel(self.width)

    def make(self, generator: Generator) -> Any:
        return torch.randn(12, 3, generator=generator), torch.randint(CLASSES, (), generator=generator)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

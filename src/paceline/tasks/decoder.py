"""A decoder like GPT-2 or Llama, whose attention stays within each of the packed documents."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.chunked_loss import CrossEntropyHead
from paceline.data.packing import isolate_documents


class DecoderBlock(nn.Module):
    """Attention and a feed-forward layer: of GPT-2, or with rotary positions, RMSNorm and SwiGLU."""

    def __init__(self, kind: str, width: int, heads: int):
        super().__init__()
        self.size = width // heads  # kept instead of the number of heads, because tp divides the heads
        self.is_gpt = kind == "gpt"
        norm: Any = nn.LayerNorm if self.is_gpt else nn.RMSNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=self.is_gpt) for _ in range(4)
        )
        hidden = 4 * width if self.is_gpt else 8 * (-(-width // 3))  # equal numbers of parameters
        self.up, self.down = nn.Linear(width, hidden, self.is_gpt), nn.Linear(hidden, width, self.is_gpt)
        self.gate = None if self.is_gpt else nn.Linear(width, hidden, bias=False)

    def forward(self, x_BTC: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normal = self.norm1(x_BTC)
        q, k, v = (
            part(normal).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if not self.is_gpt:
            q, k = (rotate(part, cos[:, None], sin[:, None]) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).flatten(2))
        normal = self.norm2(x_BTC)
        if self.gate is None:
            return x_BTC + self.down(F.gelu(self.up(normal)))
        return x_BTC + self.down(F.silu(self.gate(normal)) * self.up(normal))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated queries or keys (Su et al., RoFormer, 2021)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder(nn.Module):
    def __init__(
        self,
        kind: str,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        context: int,
        *,
        is_chunked: bool = False,
    ):
        super().__init__()
        self.size = width // heads
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width) if kind == "gpt" else None
        self.blocks = nn.ModuleList(DecoderBlock(kind, width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if kind == "gpt" else nn.RMSNorm(width)
        self.head = (CrossEntropyHead if is_chunked else nn.Linear)(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # the residual stream grows with depth (GPT-2)
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: Tensor, documents: Tensor, positions: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        x_BTC = self.token(tokens)
        if self.position is not None:
            x_BTC = x_BTC + self.position(positions)
        steps = torch.arange(0, self.size, 2, device=tokens.device, dtype=x_BTC.dtype) / self.size
        angles = positions[..., None] * 10_000.0**-steps
        mask, cos, sin = isolate_documents(documents), angles.cos(), angles.sin()
        for block in self.blocks:
            x_BTC = block(x_BTC, mask, cos, sin)
        if targets is not None and self.training:
            return self.head(self.norm(x_BTC), targets)
        return self.head(self.norm(x_BTC))

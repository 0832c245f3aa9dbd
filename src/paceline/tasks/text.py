"""A byte-level GPT on any text file: --set file=PATH. By default it learns Python's source code."""

import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Layout, Task
from paceline.errors import DataError

BYTES = 256
VALIDATION = 0.1  # fraction of the text, at its end


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = width // heads  # kept instead of the number of heads, because tp divides the heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        normal_BTC = self.norm1(x_BTC)
        q, k, v = (
            part(normal_BTC).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, context: int):
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # the residual stream grows with depth (GPT-2)
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.token(tokens_BT) + self.position(
            torch.arange(tokens_BT.size(1), device=tokens_BT.device)
        )
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


class Windows:
    """Non-overlapping windows of `context` bytes; the target is the window shifted by one byte."""

    def __init__(self, text: Tensor, context: int):
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return piece[:-1], piece[1:]


@lru_cache
def read(file: str | None) -> Tensor:
    """Return the bytes of a file, or a million bytes of Python's standard library. Raises DataError."""
    try:
        if file is not None:
            content = Path(file).read_bytes()
        else:
            library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
            content = b"".join(path.read_bytes() for path in library)[:1_000_000]
    except OSError as error:
        raise DataError(
            f"cannot read the text {file}: {error.strerror}; specify a file with --set file=PATH"
        ) from error
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


class Text(Task):
    """Next-byte prediction by a GPT."""

    file: str | None = None  # path of the text
    width: int = 128  # features of each token
    depth: int = 6  # number of blocks
    heads: int = 4  # attention heads of each block
    context: int = 128  # bytes of a window

    @property
    def tokens_per_sample(self) -> int:
        """Number of tokens of a sample, for schedules."""
        return self.context

    def model(self) -> nn.Module:
        return Gpt(self.width, self.depth, self.heads, self.context)

    def layout(self) -> Layout:
        return Layout(blocks=("blocks",))

    def dataset(self, split: str) -> Windows:
        text = read(self.file)
        border = int(len(text) * (1 - VALIDATION))
        return Windows(text[:border] if split == "train" else text[border:], self.context)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}

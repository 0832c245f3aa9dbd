"""Tasks over sequences for tests of context parallelism; some models can run on slices, others cannot."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from models import Gpt
from paceline import Layout

LENGTH = 8  # of the sequences of models.Text


class Encoder(models.Text):
    """torch's TransformerEncoder. `mask`: none, causal, banded, padding, or both of the last two."""

    batch_first: bool = True
    mask: str = "none"
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return Stock(self.batch_first, self.mask, self.dropout)

    def layout(self) -> Layout:
        return Layout(blocks=("encoder.layers",))


class Stock(nn.Module):
    def __init__(self, batch_first: bool, mask: str, dropout: float):
        super().__init__()
        self.batch_first, self.mask = batch_first, mask
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(LENGTH, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=batch_first)
        with warnings.catch_warnings(action="ignore"):  # of nested tensors
            self.encoder = nn.TransformerEncoder(layer, 2)
        self.output = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.tokens(tokens) + self.positions.weight, None
        if self.mask != "none":
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        if self.mask in ("banded", "both"):
            mask = mask.masked_fill(torch.ones_like(mask).tril(-3).bool(), -torch.inf)  # type: ignore[union-attr]
        padding = tokens > 7 if self.mask in ("padding", "both") else None  # True where a key is hidden
        if padding is not None:
            padding[:, 0] = False
            mask = mask if self.mask == "both" else None
        if padding is not None and mask is not None:
            padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=self.mask == "causal")
        return self.output(x if self.batch_first else x.transpose(0, 1))


class Llama(models.Text):
    """A model with rotary embeddings and grouped queries."""

    tied: bool = False

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=11, attn_implementation="sdpa", tie_word_embeddings=self.tied, **sizes)
        )

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch["tokens"][:, :-1]}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output.logits, batch)


class Gpt2(Llama):
    dropout: float = 0.0

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": self.dropout}
        return GPT2LMHeadModel(GPT2Config(vocab_size=11, attn_implementation="sdpa", **sizes, **drop))


class Variant(models.Text):
    """A GPT with one special operation in its blocks or around them, named by `kind`."""

    kind: str

    def model(self) -> nn.Module:
        return VariantGpt(self.kind)


class VariantBlock(nn.Module):
    def __init__(self, kind: str, width: int):
        super().__init__()
        self.kind = kind
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv.weight)  # so that a fresh convolution changes nothing
        nn.init.zeros_(self.conv.bias)
        self.multihead = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)
        self.batch_norm = nn.BatchNorm1d(width) if kind == "batch norm" else None

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], start: Tensor, condition: Tensor, mask: Tensor | None
    ) -> Tensor:
        cos, sin = angles
        if self.kind == "rotary inside":
            cos, sin = build_angles(x)
        if self.kind in ("multihead", "weights"):
            mixed, weights = self.multihead(x, x, x)
            x = x + mixed + start * condition[:, None]
            x = x + weights.mean() if self.kind == "weights" else x
            return x + self.down(self.up(x).relu())
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kind == "explicit attention":
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            drop = 0.1 if self.kind == "attention dropout" and self.training else 0.0
            if self.kind == "alibi":
                assert mask is not None
                mask = -self.slopes[:, None, None] * mask
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, dropout_p=drop)
        x = x + mixed.transpose(1, 2).flatten(2) + start * condition[:, None]
        if self.kind == "convolution":
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.batch_norm is not None:
            x = x + self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "mean":
            x = x - x.mean(1, keepdim=True)
        return x + F.dropout(
            self.down(F.gelu(self.up(x))), 0.2 if self.kind == "dropout" else 0.0, self.training
        )


class VariantGpt(nn.Module):
    """The width equals the length of the sequences, so shapes do not identify dimensions."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.tokens, self.conditions = nn.Embedding(11, LENGTH), nn.Embedding(11, LENGTH)
        self.distances = nn.Embedding(LENGTH, 2)
        self.blocks = nn.ModuleList([VariantBlock(kind, LENGTH) for _ in range(3)])
        self.output = nn.Linear(LENGTH, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = F.dropout(self.tokens(tokens), 0.2 if self.kind == "dropout" else 0.0, self.training)
        condition, intermediate = self.conditions(tokens[:, 0]), []
        length = tokens.size(1)
        positions = torch.arange(length)
        distances = (positions[:, None] - positions).abs()
        masks: dict[str, Callable[[], Tensor]] = {
            "causal mask": lambda: torch.ones(length, length).tril().bool(),
            "window": lambda: torch.ones(length, length).tril().triu(-2).bool(),
            "alibi": lambda: distances.to(x.dtype),
            # (batch, 1, 1, keys) and (batch, 1, queries, keys)
            "padding": lambda: ((tokens < 8) | (positions == 0))[:, None, None],
            "documents": lambda: (tokens[:, :, None] % 2 == tokens[:, None] % 2)[:, None],
            # learned, by head and distance
            "relative bias": lambda: self.distances(distances).permute(2, 0, 1)[None],
        }
        mask = masks[self.kind]() if self.kind in masks else None
        for block in self.blocks:
            x = block(x, build_angles(x, whole=length), start, condition, mask)
            intermediate.append(x)
            if self.kind == "cumulative between":
                x = x + 0.1 * x.cumsum(1)
        if self.kind == "stored results":
            x = x + intermediate[0].mean(1, keepdim=True)
        return self.output(F.dropout(x, 0.2 if self.kind == "dropout" else 0.0, self.training))


def build_angles(x: Tensor, whole: int | None = None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each of shape (T, 2)."""
    angles = torch.arange(whole or x.size(1), dtype=x.dtype, device=x.device)[:, None] / torch.tensor(
        [1.0, 10.0], device=x.device
    )
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Sequential(models.Text):
    """Embedding, blocks and head in one list, in which attention identifies the blocks."""

    def model(self) -> nn.Module:
        whole = Gpt()
        return nn.Sequential(
            nn.Embedding(11, 6), *whole.blocks, nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        )

    def inputs(self, batch: Any) -> Any:
        return batch["tokens"][:, :-1]


class Shorter(Variant):
    """Sequences of `length` positions, at most LENGTH."""

    length: int = 7

    def dataset(self, split: str) -> models.Rows | None:
        data = super().dataset(split)
        if data is not None:
            data.columns = {
                "tokens": data.columns["tokens"][:, : self.length + 1],
                "mask": data.columns["mask"][:, : self.length],
            }
        return data


class SharedBias(models.Text):
    """As T5: the first block computes a bias for each distance, which all blocks share."""

    def model(self) -> nn.Module:
        return SharedBiasGpt()


class SharedBiasBlock(nn.Module):
    def __init__(self, is_first: bool):
        super().__init__()
        self.qkv, self.up = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.bias = nn.Embedding(2 * LENGTH, 2) if is_first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            positions = torch.arange(x.size(1))
            bias = self.bias(positions[:, None] - positions + LENGTH).permute(2, 0, 1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        return x + self.up(x).tanh(), bias


class SharedBiasGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList([SharedBiasBlock(at == 0) for at in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x, bias = self.tokens(tokens), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.output(x)


class Translation(models.Text):
    """torch's encoder and decoder. The source has `source` positions, some of them padding."""

    source: int = 9
    decoder_layers: int = 2

    def model(self) -> nn.Module:
        return Translator(self.decoder_layers)

    def inputs(self, batch: Any) -> Any:
        tokens = batch["tokens"]
        return {"source": tokens.roll(1, 1)[:, : self.source], "target": tokens[:, :-1]}


class Translator(nn.Module):
    def __init__(self, decoder_layers: int) -> None:
        super().__init__()
        self.sources, self.targets = nn.Embedding(11, 8), nn.Embedding(11, 8)
        with warnings.catch_warnings(action="ignore"):  # of nested tensors
            self.both = nn.Transformer(8, 2, 2, decoder_layers, 12, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 11, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source > 7  # True where a key is hidden
        padding[:, 0] = False
        x, y = self.sources(source), self.targets(target)
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1), dtype=y.dtype)
        hidden = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        return self.output(
            self.both(
                x,
                y,
                tgt_mask=causal,
                src_key_padding_mask=hidden,
                memory_key_padding_mask=hidden,
                tgt_is_causal=True,
            )
        )


class Twice(models.Text):
    """A model that calls its blocks twice, with whole sequences and with their first `second` positions."""

    second: int = 7

    def model(self) -> nn.Module:
        return TwiceGpt(self.second)


class TwiceGpt(Gpt):
    def __init__(self, second: int):
        super().__init__()
        self.second = second

    def forward(self, tokens: Tensor) -> Tensor:
        whole, first = self.tokens(tokens), self.tokens(tokens[:, : self.second])
        for block in self.blocks:
            whole = block(whole)
        first = first + whole[:, : self.second]
        for block in self.blocks:
            first = block(first)
        return self.output(self.norm(whole + first.mean(1, keepdim=True)))

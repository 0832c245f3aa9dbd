"""Models of many kinds as small tasks, on which `works.py` verifies every plan.

paceline verify benchmarks/zoo.py:Llama --all --ranks 2
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.errors import TaskError

VOCABULARY, LENGTH, SAMPLES = 48, 16, 96


class RandomSamples:
    """Random samples; the index of a sample is its seed."""

    def __init__(self, make: Callable[[torch.Generator], Any]):
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(torch.Generator().manual_seed(index))


class Tokens(Task):
    """Predict the next token."""

    width: int = 32
    depth: int = 8
    heads: int = 8

    def dataset(self, split: str) -> RandomSamples | None:
        def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            return tokens[:-1], tokens[1:]

        return RandomSamples(make) if split == "train" else None

    def loss(self, output: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view_as(batch[1])


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
    def model(self) -> nn.Module:
        return Encoder(self.width, self.depth, self.heads)


def transformers() -> Any:
    try:
        import transformers as library
    except ImportError:
        raise TaskError(
            "this model requires transformers, which is not installed; run: pip install transformers"
        ) from None
    return library


class HuggingFace(Tokens):
    def inputs(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"input_ids": batch[0], "use_cache": False}


class Llama(HuggingFace):
    """Rotary positions, grouped queries, gated MLP."""

    tied: bool = False

    def model(self) -> nn.Module:
        library = transformers()
        return library.LlamaForCausalLM(
            library.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.width,
                intermediate_size=3 * self.width,
                num_hidden_layers=self.depth,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads // 2,
                max_position_embeddings=LENGTH,
                tie_word_embeddings=self.tied,
            )
        )


class Gpt2(HuggingFace):
    """Learned positions, Conv1D instead of Linear, tied embeddings, dropout, and a prime vocabulary size."""

    def model(self) -> nn.Module:
        library = transformers()
        return library.GPT2LMHeadModel(
            library.GPT2Config(
                vocab_size=VOCABULARY + 5,
                n_positions=LENGTH,
                n_embd=self.width,
                n_layer=self.depth,
                n_head=self.heads,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))) + self.shortcut(x))


class ResNet(Task):
    """ResNet-18's four stages of two blocks, with BatchNorm."""

    width: int = 4

    def model(self) -> nn.Module:
        widths = [self.width * factor for factor in (1, 1, 2, 4, 8)]
        return nn.Sequential(
            nn.Sequential(
                nn.Conv2d(3, self.width, 3, 1, 1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU()
            ),
            *(
                Residual(inputs if block == 0 else outputs, outputs, 2 if block == 0 and stage else 1)
                for stage, (inputs, outputs) in enumerate(pairwise(widths))
                for block in range(2)
            ),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)),
        )

    def dataset(self, split: str) -> RandomSamples | None:
        def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            return torch.randn(3, 16, 16, generator=generator), torch.randint(10, (), generator=generator)

        return RandomSamples(make) if split == "train" else None

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class Uneven(Task):
    """An MLP whose sizes are all odd."""

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7)) for _ in range(5)]
        return nn.Sequential(nn.Linear(5, 7), *blocks, nn.LayerNorm(7), nn.Linear(7, 3))

    def dataset(self, split: str) -> RandomSamples | None:
        def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            return torch.randn(5, generator=generator), torch.randn(3, generator=generator)

        return RandomSamples(make) if split == "train" else None

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output - batch[1]).square()

"""Train a Hugging Face model from its configuration: a small Llama that learns to add. Requires transformers.

paceline train hugging_face.py --ranks 2 --plan zero2 --epochs 2 --lr 3e-3
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import Task

CHARACTERS = "0123456789+="
ANSWER = 3  # characters at the end of each line


class Sums:
    """Lines such as 07+85=092, as token numbers. Nine of ten pairs are for training."""

    def __init__(self, largest: int, split: str):
        pairs = [(a, b) for a in range(largest) for b in range(largest)]
        self.pairs = [pair for n, pair in enumerate(pairs) if (n * 7 % 10 == 0) == (split == "validation")]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Tensor:
        a, b = self.pairs[index]
        return torch.tensor([CHARACTERS.index(character) for character in f"{a:02}+{b:02}={a + b:03}"])


class Addition(Task):
    largest: int = 40  # numbers below it are added
    width: int = 64
    layers: int = 2
    heads: int = 4

    def model(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=16,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def dataset(self, split: str) -> Sums:
        return Sums(self.largest, split)

    def inputs(self, batch: Tensor) -> dict[str, Tensor]:  # keyword arguments of the model
        return {"input_ids": batch[:, :-1]}

    def loss(self, output: Any, batch: Tensor) -> Tensor:  # one value per token
        return F.cross_entropy(output.logits.transpose(1, 2), batch[:, 1:], reduction="none")

    def weights(self, batch: Tensor) -> Tensor:  # only the tokens of the answer count
        weights = torch.zeros(batch[:, 1:].shape, device=batch.device)
        weights[:, -ANSWER:] = 1
        return weights

    def metrics(self, output: Any, batch: Tensor) -> dict[str, Tensor]:
        right = output.logits.argmax(-1)[:, -ANSWER:] == batch[:, -ANSWER:]
        return {"right": right.all(1)}

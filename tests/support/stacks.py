"""Tasks whose models are layer stacks of other libraries: torch's transformer, Hugging Face, U-Net."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import SAMPLES, Points, Rows, random_integers, random_normal
from paceline import Task

VOCABULARY, CONTEXT = 11, 7


class Encoder(Task):
    """torch's layers, with a padding mask, a parameter outside all layers, and an in-place operation."""

    def model(self) -> nn.Module:
        return Encoding()

    def dataset(self, split: str) -> Rows:
        size = SAMPLES if split == "train" else 5
        lengths = torch.arange(size) * 5 % CONTEXT + 1
        return Rows(
            tokens=random_integers(VOCABULARY, size, CONTEXT),
            padding=torch.arange(CONTEXT) >= lengths[:, None],
            y=random_integers(3, size),
        )

    def inputs(self, batch: Any) -> Any:
        return batch["tokens"], batch["padding"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch["y"], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch["y"]}


class Encoding(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.randn(CONTEXT, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x += self.position
        x = self.encoder(x, src_key_padding_mask=padding) * self.scale
        return self.out(x.masked_fill(padding[..., None], 0).sum(1))


class HuggingFace(Task):
    """A causal language model with rotary or learned positions, and dicts as input and output."""

    kind: str = "llama"
    tied: bool = True

    def model(self) -> nn.Module:
        import transformers

        options = {
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if self.kind == "gpt2":
            config = transformers.GPT2Config(
                n_embd=8,
                n_layer=3,
                n_head=2,
                n_positions=16,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                **options,
            )
            return transformers.GPT2LMHeadModel(config)
        sizes = {
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, max_position_embeddings=16, **options)
        )

    def dataset(self, split: str) -> Rows:
        size = SAMPLES if split == "train" else 5
        lengths = torch.arange(size) * 5 % CONTEXT + 2
        return Rows(
            input_ids=random_integers(VOCABULARY, size, CONTEXT + 1),
            attention_mask=(torch.arange(CONTEXT + 1) < lengths[:, None]).long(),
        )

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch["input_ids"][:, :-1], "attention_mask": batch["attention_mask"][:, :-1]}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return batch["attention_mask"][:, 1:]

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.logits.argmax(-1) == batch["input_ids"][:, 1:]}


class Skips(Points):
    """Like a U-Net: late layers use the outputs of early layers."""

    def model(self) -> nn.Module:
        return SkipsModel()


class SkipsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(10, 5) for _ in range(2)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], -1)).tanh()
        return self.out(x)


class HiddenSkip(Points):
    """A late layer uses a boolean mask of an early layer, which autograd does not track."""

    def model(self) -> nn.Module:
        return HiddenSkipModel()


class HiddenSkipModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.blocks[0](x) > 0
        for block in self.blocks:
            x = block(x).tanh()
        return self.out(x * mask)


class TwoTowers(Points):
    """Two values cross stages: each layer of the second tower also reads the result of the first tower."""

    def model(self) -> nn.Module:
        return Towers()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.second = nn.ModuleList([nn.Bilinear(5, 5, 5) for _ in range(2)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.first:
            memory = layer(memory).tanh()
        for layer in self.second:
            x = layer(x, memory).tanh() + x
        return self.out(x)


class Dropping(Points):
    """Dropout in a deep stack of small layers."""

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Dropout(0.2)]
        return nn.Sequential(*layers, nn.Linear(5, 3))


class Recomputing(Points):
    """The model recomputes its blocks in the backward pass."""

    def model(self) -> nn.Module:
        return Checkpointed()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)] + [nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Conditional(Points):
    """Control flow that depends on the values of inputs and of intermediate results."""

    def model(self) -> nn.Module:
        return ConditionalModel()


class ConditionalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x.tanh()
        return self.out(x)


class EncoderDecoder(Task):
    """A decoder that attends to an encoder. Blocks of T5 pass on the biases of their first block."""

    kind: str = "t5"

    def model(self) -> nn.Module:
        import transformers

        if self.kind == "t5":
            sizes = {
                "d_model": 8,
                "d_kv": 4,
                "d_ff": 12,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_heads": 2,
                "dropout_rate": 0.0,
            }
            return transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
            )
        stacks = {
            f"{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")
        }
        sizes = {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "dropout": 0.0, **stacks}
        if self.kind == "bart":
            return transformers.BartForConditionalGeneration(
                transformers.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)
            )
        assert self.kind == "whisper"
        tokens = {
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        config = transformers.WhisperConfig(
            max_source_positions=8, max_target_positions=16, num_mel_bins=4, **tokens, **sizes
        )
        return transformers.WhisperForConditionalGeneration(config)

    def dataset(self, split: str) -> Rows | None:
        source = (
            {"input_features": random_normal(SAMPLES, 4, 16)}
            if self.kind == "whisper"
            else {"input_ids": 3 + random_integers(8, SAMPLES, CONTEXT)}
        )
        targets = {
            "decoder_input_ids": 3 + random_integers(8, SAMPLES, 5, seed=1),
            "y": random_integers(VOCABULARY, SAMPLES, 5, seed=2),
        }
        return Rows(**source, **targets) if split == "train" else None

    def inputs(self, batch: Any) -> Any:
        return {name: value for name, value in batch.items() if name != "y"} | {"use_cache": False}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), batch["y"], reduction="none")


class PassingBlocks(Points):
    """Blocks pass on their arguments, a constant that one block makes, and an unused result."""

    def model(self) -> nn.Module:
        return PassingModel()


class PassingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PassingBlock(scale is None) for scale in (None, 1, 1, 1)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        sign, scale, unused = x.sign(), None, x
        x = x + 1
        for block in self.blocks:
            x, sign, scale, unused = block(x, sign, scale, unused)
        return self.out(x * sign)


class PassingBlock(nn.Module):
    def __init__(self, makes_scale: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)
        self.bias = nn.Parameter(torch.ones(5))
        self.makes_scale = makes_scale

    def forward(self, x: Tensor, sign: Tensor, scale: Tensor | None, unused: Tensor) -> Any:
        if self.makes_scale:
            scale = torch.full((5,), 0.7, dtype=x.dtype)
        return (self.linear(x) * scale).tanh() + self.bias, sign, scale, self.unused(unused)

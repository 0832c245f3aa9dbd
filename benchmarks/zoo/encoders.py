"""Text encoders of transformers, by name, trained to predict masked tokens.

paceline verify benchmarks/zoo/encoders.py:Encoder --set kind=bert --plan zero3 --ranks 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from decoders import SIZES
from from_config import build
from samples import LENGTH, VOCABULARY, Synthetic, read_logits

BERT: dict[str, Any] = SIZES | {"type_vocab_size": 2}
# RoBERTa counts positions from the padding token on.
ROBERTA: dict[str, Any] = BERT | {"max_position_embeddings": 2 * LENGTH + 2, "pad_token_id": 1}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", "albert", BERT | {"embedding_size": 16}),
    "bert": ("BertForMaskedLM", "bert", BERT),
    "big-bird": ("BigBirdForMaskedLM", "big_bird", BERT | {"attention_type": "original_full"}),
    "convbert": ("ConvBertForMaskedLM", "convbert", BERT | {"embedding_size": 16}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        "deberta-v2",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "distilbert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 2 * LENGTH,
        },
    ),
    "electra": ("ElectraForMaskedLM", "electra", BERT | {"embedding_size": 16}),
    "esm": ("EsmForMaskedLM", "esm", ROBERTA | {"position_embedding_type": "rotary"}),
    "fnet": ("FNetForMaskedLM", "fnet", BERT),
    "mobilebert": (
        "MobileBertForMaskedLM",
        "mobilebert",
        BERT | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "modernbert",
        SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "mpnet": ("MPNetForMaskedLM", "mpnet", ROBERTA),
    "perceiver": (
        "PerceiverForMaskedLM",
        "perceiver",
        {
            "vocab_size": VOCABULARY,
            "num_latents": 8,
            "d_latents": 32,
            "d_model": 32,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 32,
            "v_channels": 32,
            "max_position_embeddings": LENGTH,
        },
    ),
    "roberta": ("RobertaForMaskedLM", "roberta", ROBERTA),
    "roformer": ("RoFormerForMaskedLM", "roformer", BERT | {"embedding_size": 32}),
    "squeezebert": ("SqueezeBertForMaskedLM", "squeezebert", BERT | {"embedding_size": 32}),
    "xlnet": (
        "XLNetLMHeadModel",
        "xlnet",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
}


class Encoder(Synthetic):
    """The model `kind` of MODELS. A quarter of the tokens is masked and counts; padding is hidden."""

    kind: str = "bert"

    def make(self, generator: Generator) -> dict[str, Tensor]:
        tokens = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
        masked = torch.rand(LENGTH, generator=generator) < 0.25
        masked[0] = True
        used = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator)
        return {"tokens": tokens, "masked": masked & used, "used": used.long()}

    def model(self) -> nn.Module:
        model, kind, keys = MODELS[self.kind]
        return build(model, kind, **keys)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {"input_ids": batch["tokens"].where(~batch["masked"], 3)}
        return (
            inputs if self.kind in ("fnet", "nystromformer") else inputs | {"attention_mask": batch["used"]}
        )

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(read_logits(output).mT, batch["tokens"], reduction="none")

    def weights(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["masked"].to(torch.get_default_dtype())

"""Models of transformers with every kind of attention, small, as tasks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Pairs, random_integers, random_normal
from paceline import Task

VOCABULARY, SAMPLES = 32, 24
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
}
DECODER: dict[str, Any] = {**TOKENS, **BLOCKS, "num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BOTH: dict[str, Any] = {
    **TOKENS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
T5: dict[str, Any] = {
    **TOKENS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    "dropout_rate": 0.0,
}
VISION: dict[str, Any] = {**BLOCKS, "image_size": 32, "patch_size": 8}
# Name -> class, kind of configuration, its keys
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "vit", {**VISION, **NO_DROPOUT, "num_labels": 3}),
    "bert": ("BertForMaskedLM", "bert", {**TOKENS, **BLOCKS, **NO_DROPOUT}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "modernbert",
        {**TOKENS, **BLOCKS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 6}
        | {"global_attn_every_n_layers": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "gpt2",
        {**TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "mistral": ("MistralForCausalLM", "mistral", {**DECODER, "sliding_window": 3}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**DECODER, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "t5": ("T5ForConditionalGeneration", "t5", T5),
    "bart": ("BartForConditionalGeneration", "bart", BOTH),
    "whisper": (
        "WhisperForConditionalGeneration",
        "whisper",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 13, "max_target_positions": 32},
    ),
    "clip": (
        "CLIPModel",
        "clip",
        {
            "text_config": {**TOKENS, **BLOCKS, "projection_dim": 8},
            "vision_config": {**VISION, "projection_dim": 8},
            "projection_dim": 8,
        },
    ),
}
ENCODER_DECODERS = ("t5", "bart")
FLOAT32_INSIDE = ("t5", "gemma3")  # their norms


class Attention(Task):
    """The model `kind` of MODELS on random samples. `padded`: texts have from 5 to `length` tokens."""

    kind: str
    attention: str = "sdpa"
    length: int = 9
    padded: bool = False

    def model(self) -> nn.Module:
        import transformers

        name, kind, keys = MODELS[self.kind]
        config = transformers.AutoConfig.for_model(kind, attn_implementation=self.attention, **keys)
        model: nn.Module = getattr(transformers, name)(config)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # that of keys would otherwise be rounding alone
                nn.init.normal_(parameter, std=0.1)
        return model

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        targets = 3 + random_integers(VOCABULARY - 3, SAMPLES, 8, seed=1)
        if self.kind in ("vit", "clip"):
            images = random_normal(SAMPLES, 3, 32, 32)
            return Pairs(x=images, y=targets[:, 0] % 3 if self.kind == "vit" else targets)
        if self.kind == "whisper":
            return Pairs(x=random_normal(SAMPLES, 8, 26), y=targets)
        lengths = self.length - random_integers(self.length - 4, SAMPLES, seed=2) * self.padded
        mask = (torch.arange(self.length) < lengths[:, None]).long()
        words = 3 + random_integers(VOCABULARY - 3, SAMPLES, self.length)
        return Pairs(x=words * mask, y=targets, mask=mask)

    def inputs(self, batch: Any) -> dict[str, Any]:
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "vit": lambda: {"pixel_values": batch[0]},
            "clip": lambda: {"pixel_values": batch[0], "input_ids": batch[1]},
            "whisper": lambda: {
                "input_features": batch[0],
                "decoder_input_ids": batch[1],
                "use_cache": False,
            },
        }
        if self.kind in makers:
            return makers[self.kind]()
        mask = {"attention_mask": batch[2]} if self.padded else {}
        targets = {"decoder_input_ids": batch[1]} if self.kind in ENCODER_DECODERS else {}
        cache = {} if self.kind in ("bert", "modernbert") else {"use_cache": False}
        return {"input_ids": batch[0], **mask, **targets, **cache}

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.kind == "clip":
            return (output.image_embeds * output.text_embeds.roll(1, -1)).sum(-1)
        if self.kind == "vit":
            return F.cross_entropy(output.logits, batch[1], reduction="none")
        labels = batch[1] if self.kind in (*ENCODER_DECODERS, "whisper") else batch[0]
        return F.cross_entropy(output.logits.movedim(-1, 1), labels.roll(-1, 1), reduction="none")

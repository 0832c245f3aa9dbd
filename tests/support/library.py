"""Small models of the library transformers, by name, as tasks of their kind."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models import Pairs, random_integers, random_normal
from paceline import Task

VOCABULARY, LENGTH, SAMPLES = 64, 10, 24


def _config(kind: str, **keys: Any) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **keys)


def _build_model(model: str, kind: str, **keys: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(_config(kind, **keys))


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
STATE_SPACE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "state_size": 8,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_start_token_id": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
AUDIO: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "layer_type": "basic",
    "num_labels": 3,
}
VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": 3}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gemma3": lambda: _build_model(
        "Gemma3ForCausalLM", "gemma3_text", **DECODER, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "mamba": lambda: _build_model("MambaForCausalLM", "mamba", **STATE_SPACE),
    "mamba2": lambda: _build_model(
        "Mamba2ForCausalLM", "mamba2", **STATE_SPACE, num_heads=8, head_dim=8, n_groups=2, chunk_size=4
    ),
    "mixtral": lambda: _build_model(
        "MixtralForCausalLM", "mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: _build_model(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **DECODER,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "bart": lambda: _build_model(
        "BartForConditionalGeneration", "bart", **ENCODER_DECODER, max_position_embeddings=32
    ),
    "t5": lambda: _build_model("T5ForConditionalGeneration", "t5", **T5),
    "whisper": lambda: _build_model("WhisperForConditionalGeneration", "whisper", **ENCODER_DECODER, **AUDIO),
    "resnet": lambda: _build_model("ResNetForImageClassification", "resnet", **RESNET),
    "mobilenet": lambda: _build_model(
        "MobileNetV2ForImageClassification",
        "mobilenet_v2",
        image_size=32,
        depth_multiplier=0.25,
        num_labels=3,
    ),
    "vit": lambda: _build_model("ViTForImageClassification", "vit", **DECODER, **VIT),
}
IMAGE_MODELS, AUDIO_MODELS, ENCODER_DECODER_MODELS = (
    ("resnet", "mobilenet", "vit"),
    ("whisper",),
    ("bart", "t5"),
)


class Library(Task):
    """The model `kind` of MODELS, on random data of its kind."""

    kind: str = "gemma3"

    def model(self) -> nn.Module:
        return MODELS[self.kind]()

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        if self.kind in IMAGE_MODELS:
            return Pairs(x=random_normal(SAMPLES, 3, 32, 32), y=random_integers(3, SAMPLES, seed=1))
        words = 3 + random_integers(VOCABULARY - 3, SAMPLES, LENGTH)
        return Pairs(
            x=random_normal(SAMPLES, 8, 32) if self.kind in AUDIO_MODELS else words,
            y=3 + random_integers(VOCABULARY - 3, SAMPLES, LENGTH, seed=1),
        )

    def inputs(self, batch: Any) -> Any:
        if self.kind in IMAGE_MODELS:
            return {"pixel_values": batch[0]}
        if self.kind in AUDIO_MODELS:
            return {"input_features": batch[0], "decoder_input_ids": batch[1], "use_cache": False}
        if self.kind in ENCODER_DECODER_MODELS:
            return {"input_ids": batch[0], "decoder_input_ids": batch[1], "use_cache": False}
        return {"input_ids": batch[0], "use_cache": False}

    def loss(self, output: Any, batch: Any) -> Tensor:
        logits = output.logits
        return F.cross_entropy(
            logits.movedim(-1, 1), batch[1].roll(-1, 1) if logits.dim() == 3 else batch[1], reduction="none"
        )

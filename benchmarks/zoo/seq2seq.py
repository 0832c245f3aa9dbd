"""Models of transformers with an encoder and a decoder, by name.

paceline verify benchmarks/zoo/seq2seq.py:Translation --set kind=t5 --plan zero3 --ranks 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from from_config import SPECIAL, build
from samples import LENGTH, VOCABULARY, Synthetic, read_logits

BART: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 2 * LENGTH,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
SPEECH: dict[str, Any] = BART | {
    "num_mel_bins": 8,
    "max_source_positions": LENGTH,
    "max_target_positions": 2 * LENGTH,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", "bart", BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", "blenderbot", BART),
    "m2m-100": ("M2M100ForConditionalGeneration", "m2m_100", BART),
    "marian": ("MarianMTModel", "marian", BART),
    "mt5": ("MT5ForConditionalGeneration", "mt5", T5),
    "pegasus": ("PegasusForConditionalGeneration", "pegasus", BART),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        "prophetnet",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 2 * LENGTH,
            "decoder_start_token_id": 1,
            "num_buckets": 8,
            "relative_max_distance": 16,
        },
    ),
    "t5": ("T5ForConditionalGeneration", "t5", T5),
    "whisper": ("WhisperForConditionalGeneration", "whisper", SPEECH),
    "speech-to-text": (
        "Speech2TextForConditionalGeneration",
        "speech_to_text",
        SPEECH | {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 2 * LENGTH},
    ),
}


class Translation(Synthetic):
    """The model `kind` of MODELS, from tokens to tokens."""

    kind: str = "t5"

    def make(self, generator: Generator) -> Any:
        source, target = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        return source, target

    def model(self) -> nn.Module:
        model, kind, keys = MODELS[self.kind]
        return build(model, kind, **keys)

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input_ids": batch[0], "decoder_input_ids": batch[1], "use_cache": False}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(read_logits(output).mT, batch[1].roll(-1, 1), reduction="none")


class Transcription(Translation):
    """The model `kind` of MODELS, from a spectrogram to tokens."""

    kind: str = "whisper"

    def make(self, generator: Generator) -> Any:
        shape = (8, 2 * LENGTH) if self.kind == "whisper" else (2 * LENGTH, 8)
        return torch.randn(shape, generator=generator), torch.randint(
            3, VOCABULARY, (LENGTH,), generator=generator
        )

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input_features": batch[0], "decoder_input_ids": batch[1], "use_cache": False}

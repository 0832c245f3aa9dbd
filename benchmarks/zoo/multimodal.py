"""Models of transformers for images with text, sound, video, series and trajectories.

paceline verify benchmarks/zoo/multimodal.py:Clip --plan zero3 --ranks 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from contrastive import match
from decoders import SIZES
from encoders import BERT
from from_config import build
from samples import CHANNELS, CLASSES, LENGTH, SIDE, VOCABULARY, Synthetic, read_logits

TEXT: dict[str, Any] = {**SIZES, "projection_dim": 16}
IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 4,
}
SOUND: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_kernel": [8, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": CLASSES,
    "classifier_proj_size": 16,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ast": (
        "ASTForAudioClassification",
        "audio-spectrogram-transformer",
        {key: value for key, value in IMAGE.items() if key != "image_size"}
        | {"max_length": 32, "num_mel_bins": 16, "num_labels": CLASSES},
    ),
    "hubert": ("HubertForSequenceClassification", "hubert", SOUND),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "wav2vec2", SOUND),
    "wavlm": (
        "WavLMForSequenceClassification",
        "wavlm",
        SOUND | {"num_buckets": 8, "max_bucket_distance": 16},
    ),
    "timesformer": (
        "TimesformerForVideoClassification",
        "timesformer",
        IMAGE | {"num_frames": 4, "num_labels": CLASSES},
    ),
    "videomae": (
        "VideoMAEForVideoClassification",
        "videomae",
        IMAGE | {"num_frames": 4, "tubelet_size": 2, "num_labels": CLASSES},
    ),
}
NAMES = {"ast": "input_values", "timesformer": "pixel_values", "videomae": "pixel_values"}
SHAPES = {"ast": (32, 16), "timesformer": (4, CHANNELS, SIDE, SIDE), "videomae": (4, CHANNELS, SIDE, SIDE)}


class Signals(Synthetic):
    """Classify sounds or videos by the model `kind` of MODELS."""

    kind: str = "wav2vec2"

    def make(self, generator: Generator) -> Any:
        shape = SHAPES.get(self.kind, (400,))
        return torch.randn(shape, generator=generator), torch.randint(CLASSES, (), generator=generator)

    def model(self) -> nn.Module:
        model, kind, keys = MODELS[self.kind]
        return build(model, kind, **keys)

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {NAMES.get(self.kind, "input_values"): batch[0]}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(read_logits(output), batch[1], reduction="none")


class Captions(Synthetic):
    """Pairs of an image and a text."""

    def make(self, generator: Generator) -> Any:
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        tokens[-1] = 2
        return torch.randn(CHANNELS, SIDE, SIDE, generator=generator), tokens

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {"pixel_values": batch[0], "input_ids": batch[1]}


class Clip(Captions):
    """Match images and texts of the whole global batch."""

    def model(self) -> nn.Module:
        return build("CLIPModel", "clip", text_config=TEXT, vision_config=IMAGE, projection_dim=16)

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        return match(output.image_embeds, output.text_embeds, 10.0)


class Siglip(Captions):
    """Sigmoids of all pairs of the global batch."""

    def model(self) -> nn.Module:
        text = {key: value for key, value in SIZES.items() if key != "head_dim"}
        return build("SiglipModel", "siglip", text_config=text, vision_config=IMAGE)

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        similarity = 10 * output.image_embeds @ output.text_embeds.T
        signs = 2 * torch.eye(len(similarity), dtype=similarity.dtype) - 1
        return -F.logsigmoid(signs * (similarity - 10)).sum() / len(similarity)


class Vilt(Captions):
    """One transformer over patches and tokens that answers a question."""

    def make(self, generator: Generator) -> Any:
        return *super().make(generator), torch.randint(CLASSES, (), generator=generator)

    def model(self) -> nn.Module:
        keys = BERT | IMAGE | {"num_labels": CLASSES, "max_image_length": -1}
        return build("ViltForQuestionAnswering", "vilt", **keys)

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return super().inputs(batch[:2]) | {"pixel_mask": torch.ones_like(batch[0][:, 0]).long()}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(read_logits(output), batch[2], reduction="none")


class PatchTst(Synthetic):
    """Forecast series from patches of their past."""

    def make(self, generator: Generator) -> Any:
        series = torch.randn(40, 3, generator=generator)
        return series[:32], series[32:]

    def model(self) -> nn.Module:
        return build(
            "PatchTSTForPrediction",
            "patchtst",
            num_input_channels=3,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=8,
            d_model=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=32,
            loss="mse",
        )

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {"past_values": batch[0]}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output.prediction_outputs - batch[1]).square()


class DecisionTransformer(Synthetic):
    """Predict actions from returns, states and actions."""

    def make(self, generator: Generator) -> dict[str, Tensor]:
        return {
            "states": torch.randn(6, 5, generator=generator),
            "actions": torch.randn(6, 2, generator=generator),
            "returns_to_go": torch.randn(6, 1, generator=generator),
            "timesteps": torch.arange(6),
            "attention_mask": torch.ones(6),
        }

    def model(self) -> nn.Module:
        return build(
            "DecisionTransformerModel",
            "decision_transformer",
            state_dim=5,
            act_dim=2,
            hidden_size=32,
            max_ep_len=16,
            n_layer=2,
            n_head=4,
            n_positions=32,
        )

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        return (output.action_preds - batch["actions"]).square()

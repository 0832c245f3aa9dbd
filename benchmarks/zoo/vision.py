"""Vision models of transformers, by name.

paceline verify benchmarks/zoo/vision.py:Vision --set kind=convnext --plan zero3 --ranks 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from from_config import build
from samples import CHANNELS, CLASSES, Images, read_logits

SIDE = 32
COMMON: dict[str, Any] = {"num_labels": CLASSES}
VIT: dict[str, Any] = {
    **COMMON,
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
STAGES: dict[str, Any] = {**COMMON, "depths": [2, 2], "hidden_sizes": [16, 32]}
SWIN: dict[str, Any] = {
    **COMMON,
    "image_size": SIDE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
MOBILE: dict[str, Any] = {
    **COMMON,
    "image_size": SIDE,
    "depth_multiplier": 0.1,
    "min_depth": 4,
    "depth_divisible_by": 4,
    "finegrained_output": False,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "beit": ("BeitForImageClassification", "beit", VIT | {"use_relative_position_bias": True}),
    "bit": ("BitForImageClassification", "bit", STAGES | {"embedding_size": 16, "num_groups": 4}),
    "convnext": ("ConvNextForImageClassification", "convnext", STAGES | {"num_stages": 2}),
    "convnextv2": ("ConvNextV2ForImageClassification", "convnextv2", STAGES | {"num_stages": 2}),
    "cvt": (
        "CvtForImageClassification",
        "cvt",
        COMMON
        | {
            "patch_sizes": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [2, 1],
            "embed_dim": [16, 32],
            "num_heads": [1, 2],
            "depth": [1, 2],
            "mlp_ratio": [2.0, 2.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
        },
    ),
    "deit": ("DeiTForImageClassification", "deit", VIT),
    "dinov2": ("Dinov2ForImageClassification", "dinov2", VIT),
    "efficientnet": (
        "EfficientNetForImageClassification",
        "efficientnet",
        COMMON
        | {
            "image_size": SIDE,
            "width_coefficient": 0.5,
            "depth_coefficient": 1.0,
            "hidden_dim": 640,
            "in_channels": [32, 32, 48],
            "out_channels": [32, 48, 64],
            "kernel_sizes": [3, 3, 5],
            "strides": [1, 2, 2],
            "num_block_repeats": [1, 2, 2],
            "expand_ratios": [1, 4, 4],
            "depthwise_padding": [],
        },
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        "focalnet",
        {k: v for k, v in SWIN.items() if k not in ("num_heads", "window_size")}
        | {"hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    ),
    "levit": (
        "LevitForImageClassification",
        "levit",
        COMMON
        | {
            "image_size": SIDE,
            "patch_size": 16,
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 4, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "mobilenet-v1": (
        "MobileNetV1ForImageClassification",
        "mobilenet_v1",
        MOBILE,
    ),
    "mobilenet-v2": (
        "MobileNetV2ForImageClassification",
        "mobilenet_v2",
        MOBILE,
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        "mobilevit",
        COMMON
        | {
            "image_size": SIDE,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 4,
        },
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        "poolformer",
        COMMON
        | {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
        },
    ),
    "pvt": (
        "PvtForImageClassification",
        "pvt",
        COMMON
        | {
            "image_size": SIDE,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "regnet": ("RegNetForImageClassification", "regnet", STAGES | {"embedding_size": 16, "groups_width": 8}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "segformer",
        COMMON
        | {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "swin": ("SwinForImageClassification", "swin", SWIN),
    "swinv2": ("Swinv2ForImageClassification", "swinv2", SWIN),
    "vit": ("ViTForImageClassification", "vit", VIT),
    "vit-mae": (
        "ViTMAEForPreTraining",
        "vit_mae",
        VIT
        | {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "yolos": (
        "YolosForObjectDetection",
        "yolos",
        VIT | {"image_size": [SIDE, SIDE], "num_detection_tokens": 4},
    ),
}


class Vision(Images):
    """The image classifier `kind` of MODELS."""

    kind: str = "vit"
    side: int = SIDE

    def model(self) -> nn.Module:
        model, kind, keys = MODELS[self.kind]
        return build(model, kind, **keys)

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"pixel_values": batch[0]}


class Segmentation(Vision):
    """Each point of a coarse grid has a class."""

    kind: str = "segformer"

    def make(self, generator: Generator) -> Any:
        image = torch.randn(CHANNELS, SIDE, SIDE, generator=generator)
        return image, torch.randint(CLASSES, (SIDE // 4, SIDE // 4), generator=generator)


class Detection(Vision):
    """Each query predicts a class and a box. The targets are in the order of the queries."""

    kind: str = "yolos"

    def make(self, generator: Generator) -> Any:
        image = torch.randn(CHANNELS, SIDE, SIDE, generator=generator)
        classes = torch.randint(CLASSES, (4,), generator=generator)
        return image, classes, torch.rand(4, 4, generator=generator)

    def loss(self, output: Any, batch: Any) -> dict[str, Tensor]:
        classes = F.cross_entropy(read_logits(output).mT, batch[1], reduction="none")
        return {"classes": classes, "boxes": (output.pred_boxes - batch[2]).abs()}


class Reconstruction(Vision):
    """A masked autoencoder: predict the pixels of hidden patches. Each sample has its own mask."""

    kind: str = "vit-mae"

    def inputs(self, batch: Any, rng: Any) -> dict[str, Any]:
        return {"pixel_values": batch[0], "noise": rng.rand((SIDE // 8) ** 2)}

    def loss(self, output: Any, batch: Any) -> Tensor:
        size = SIDE // 8
        patches = batch[0].unflatten(3, (size, 8)).unflatten(2, (size, 8))
        target = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return ((output.logits - target).square().mean(-1) * output.mask).sum(1) / output.mask.sum(1)

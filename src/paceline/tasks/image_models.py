"""Image classifiers by name: of torchvision or timm, or ResNets and EfficientNets of transformers."""

import importlib
from typing import Any

from torch import Tensor, nn

from paceline.errors import TaskError

# He et al., Deep residual learning, 2015, table 1: kind of layer, and layers of each stage.
RESNETS = {
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
}
# Tan and Le, EfficientNet, 2019: factors of width and depth, and dropout.
EFFICIENTNETS = {
    "efficientnet_b0": (1.0, 1.0, 0.2),
    "efficientnet_b1": (1.0, 1.1, 0.2),
    "efficientnet_b2": (1.1, 1.2, 0.3),
    "efficientnet_b3": (1.2, 1.4, 0.3),
    "efficientnet_b4": (1.4, 1.8, 0.4),
    "efficientnet_b5": (1.6, 2.2, 0.4),
    "efficientnet_b6": (1.8, 2.6, 0.5),
    "efficientnet_b7": (2.0, 3.1, 0.5),
}


class Logits(nn.Module):
    """A model of transformers that returns a tensor."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def build_image_model(name: str, classes: int, channels: int = 3) -> nn.Module:
    """Return a classifier of images of shape (batch, channels, height, width), with random weights.

    name: `resnet18` to `resnet152`, `efficientnet_b0` to `efficientnet_b7` of transformers;
    `torchvision:NAME` or `timm:NAME` for a model of these libraries. Raises TaskError.
    """
    library, _, model = name.rpartition(":")
    if library == "torchvision" and channels == 3:
        return _import("torchvision.models").get_model(model, num_classes=classes)
    if library == "timm":
        return _import("timm").create_model(model, num_classes=classes, in_chans=channels)
    if library or name not in {**RESNETS, **EFFICIENTNETS}:
        raise TaskError(
            f"no image model {name!r} for {channels} channels; available:"
            f" {', '.join([*RESNETS, *EFFICIENTNETS])}, timm:NAME, and for 3 channels torchvision:NAME"
        )
    transformers = _import("transformers")
    if name in RESNETS:
        kind, depths = RESNETS[name]
        widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
        config = transformers.ResNetConfig(
            num_channels=channels,
            hidden_sizes=widths,
            depths=list(depths),
            layer_type=kind,
            num_labels=classes,
        )
        return Logits(transformers.ResNetForImageClassification(config))
    width, depth, dropout = EFFICIENTNETS[name]
    config = transformers.EfficientNetConfig(
        num_channels=channels,
        width_coefficient=width,
        depth_coefficient=depth,
        hidden_dim=round(1280 * width),
        dropout_rate=dropout,
        num_labels=classes,
    )
    return Logits(transformers.EfficientNetForImageClassification(config))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # torchvision raises each of them without CUDA
        library = name.partition(".")[0]
        package = "'paceline[hf]'" if library == "transformers" else library
        raise TaskError(f"cannot import {library} ({error}); install it: pip install {package}") from error

"""Models of the library transformers, built from small configurations with random weights."""

from typing import Any

from torch import nn

from paceline.hf.folder import import_transformers


def build(model: str, kind: str, **keys: Any) -> nn.Module:
    """Return a model of a class of transformers. kind: the `model_type` of its configuration."""
    transformers = import_transformers()
    config = transformers.AutoConfig.for_model(kind, **keys)
    return getattr(transformers, model)(config)


SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

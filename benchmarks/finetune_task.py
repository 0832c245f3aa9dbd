"""The task of hf: behind a gate, for finetune.py."""

from typing import Any

from torch import Tensor

from gates import gate
from paceline.hf.task import HuggingFace


class Gated(HuggingFace):
    """A fine-tuning whose steps wait at the gate."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        gate()()
        return super().inputs(batch)

"""Low-rank adapters of linear layers: frozen weights plus the product of two small trained matrices."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.spec import Value, suggest

A, B = "lora_A", "lora_B"


class Lora(Value):
    """The table `lora` of a task: adapters, in place of training all weights."""

    rank: Annotated[int, Field(ge=1, description="columns of A and rows of B")]
    alpha: Annotated[
        float | None,
        Field(gt=0, description="adapters are scaled by alpha ÷ rank; by default, alpha is the rank"),
    ] = None
    targets: Annotated[
        tuple[str, ...] | None,
        Field(
            description="last parts of names of linear layers, such as q_proj; by default, all but the output"
        ),
    ] = None

    @property
    def resolved_alpha(self) -> float:
        return self.alpha if self.alpha is not None else float(self.rank)


class LoraLinear(nn.Module):
    """A linear layer with an adapter: y = x Wᵀ + b + (α / r) (x Aᵀ) Bᵀ (Hu et al., LoRA, 2021, equation 3).

    W and b are those of the layer, under its names, and frozen. A has shape (r, in) and starts as a
    linear layer of torch does; B has shape (out, r) and starts at 0.
    """

    def __init__(self, layer: Any, rank: int, alpha: float):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.is_transposed = not isinstance(layer, nn.Linear)  # Conv1D of transformers, as in GPT-2
        out, width = self.weight.shape[::-1] if self.is_transposed else self.weight.shape
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, width))
        self.lora_B = nn.Parameter(torch.zeros(out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self.is_transposed else self.weight
        return F.linear(x, weight, self.bias) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


def add_adapters_(model: Any, lora: Lora, trained: tuple[str, ...] = ()) -> None:
    """Freeze a model of transformers, and add an adapter to each target.

    trained: names of modules that stay trained. Raises TaskError for a target that does not exist.
    """
    from transformers.pytorch_utils import Conv1D

    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    output = model.get_output_embeddings()
    known = sorted({name.rpartition(".")[2] for name, layer in layers.items() if layer is not output})
    for target in lora.targets or ():
        if target not in known:
            raise TaskError(f"lora.targets: the model has no linear layer {target!r}{suggest(target, known)}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in trained:
        for parameter in model.get_submodule(name).parameters():
            parameter.requires_grad_(True)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        if layer is output or name in trained or (lora.targets is not None and last not in lora.targets):
            continue
        setattr(model.get_submodule(parent), last, LoraLinear(layer, lora.rank, lora.resolved_alpha))


def find_adapters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of adapters."""
    return frozenset(
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
        for part in (A, B)
    )


def merge(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the model without adapters that computes the same.

    weights: of a model with adapters, by name. model: such a model, which may be on the meta device.
    """
    adapted = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    added = find_adapters(model)
    merged = {name: value for name, value in weights.items() if name not in added}
    for name, layer in adapted.items():
        change = weights[name + B] @ weights[name + A] * layer.scale
        merged[f"{name}weight"] = weights[f"{name}weight"] + (change.T if layer.is_transposed else change)
    return merged

"""Mixtures of experts of transformers: the loss that balances experts.

Causal language models add E · Σ f(e) · P(e) over the experts e (Fedus, Zoph and Shazeer, Switch Transformers,
2022, equations 4 to 6). f(e) is the number of times that e was chosen for a token, and P(e) the sum of its
probabilities, both over all layers and tokens, divided by the number of tokens × layers.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.hf.folder import import_transformers, open_folder
from paceline.hf.objectives import CAUSAL_LM, choose_objective

NAME = "aux_loss"  # as in the outputs of transformers
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]  # of the function of transformers


@dataclass(frozen=True)
class ExpertBalance:
    """The loss that balances the experts of a model. top_k: experts by token. weight: in the loss."""

    top_k: int
    weight: float


@lru_cache(maxsize=8)
def find_balance(reference: str, objective: str | None, weight: float | None) -> ExpertBalance | None:
    """Return the loss that balances the experts of a folder's model; None if it is not added.

    weight: None: that of the configuration, if the configuration requests the loss, as transformers does.
    Raises TaskError if a weight is requested for a model without this loss.
    """
    folder = open_folder(reference)
    row = choose_objective(objective, folder)
    if weight is None and not folder.tree.get("output_router_logits"):
        return None
    config = folder.read_config()
    top_k: Any = getattr(config, "num_experts_per_tok", None)
    own_weight: Any = getattr(config, "router_aux_loss_coef", None)
    can_balance = row is CAUSAL_LM and isinstance(top_k, int) and isinstance(own_weight, (int, float))
    if not can_balance or not _has_known_loss(row.classes()[folder.kind]):
        if weight:
            raise TaskError(
                f"router_aux_loss_coef={weight:g} requires a mixture of experts whose causal language model "
                f"in transformers balances them, such as Mixtral or Qwen3-MoE, got the {row.what} of "
                f"model_type {folder.kind!r}; leave it out"
            )
        return None
    weight = weight if weight is not None else float(own_weight)
    return ExpertBalance(top_k, weight) if weight else None


def _has_known_loss(name: str) -> bool:
    """Return whether a class of transformers balances its experts by the loss of this module."""
    module = sys.modules[getattr(import_transformers(), name).__module__]
    function = getattr(module, "load_balancing_loss_func", None)
    return function is not None and [*inspect.signature(function).parameters] == PARAMETERS


def sum_router_outputs(output: Any, batch: Mapping[str, Tensor], top_k: int) -> dict[str, Tensor]:
    """Return how often each expert was chosen, its probabilities, and the tokens, summed over all layers.

    Tokens that `attention_mask` hides do not count. Raises TaskError if the output has no router logits.
    """
    layers = getattr(output, "router_logits", None)
    if not layers:
        raise TaskError(
            "the model returned no router_logits, from which aux_loss is computed; use another plan, or "
            "leave out aux_loss with --set router_aux_loss_coef=0"
        )
    mask = batch.get("attention_mask")
    chosen: list[Tensor] = []
    probabilities: list[Tensor] = []
    for logits in layers:
        found = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        counts = mask.flatten().to(found.dtype) if mask is not None else found.new_ones(len(found))
        indices = found.topk(top_k, -1).indices
        zeros = found.new_zeros(found.shape[-1])
        chosen.append(zeros.scatter_add(0, indices.flatten(), counts.repeat_interleave(top_k)))
        probabilities.append((found * counts[:, None]).sum(0))
    tokens = counts.sum() * len(layers)
    return {
        "chosen": torch.stack(chosen).sum(0).detach(),
        "probabilities": torch.stack(probabilities).sum(0),
        "tokens": tokens,
    }


def balance(sums: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that balances the experts, from the sums over all tokens."""
    shares, means = sums["chosen"] / sums["tokens"], sums["probabilities"] / sums["tokens"]
    return len(shares) * (shares * means).sum()

"""Activation checkpointing: recompute a block in the backward pass, wholly or all but its matrix products."""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.plan.plan import Plan


def recompute(module: nn.Module, plan: Plan) -> None:
    """Forget the activations inside of `module` and compute them again in the backward pass; selective: but keep the results of
    products and attention, which are dear (Korthikanti et al., Reducing activation recomputation, 2022)."""
    from torch.utils.checkpoint import checkpoint

    inner = module.forward
    selective = plan.recompute == "selective"
    options: dict[str, Any] = (
        {"context_fn": partial(_selective_contexts, again=plan.splits_backward)} if selective else {}
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    module.forward = forward


def _selective_contexts(again: bool) -> tuple[Any, Any]:
    """What runs around a forward pass, and around its recomputation; `again`: of which there may be several."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keeping, giving = create_selective_checkpoint_contexts(SAVED_OPS)
    return keeping, _RepeatableRecompute(giving) if again else giving


@dataclass
class _RepeatableRecompute:
    """Gives what was kept in each backward pass. torch's context gives a result once, and forgets it (2.13)."""

    giving: Any

    def __enter__(self) -> None:
        self.kept = {operation: copy(results) for operation, results in self.giving.storage.items()}
        self.giving.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.giving.__exit__(*error)
        self.giving.storage.update(self.kept)


ATEN = torch.ops.aten
SAVED_OPS = [
    op.default
    for op in (
        ATEN.mm,
        ATEN.addmm,
        ATEN.bmm,
        ATEN.convolution,
        ATEN._scaled_dot_product_flash_attention,
        ATEN._scaled_dot_product_flash_attention_for_cpu,
        ATEN._scaled_dot_product_efficient_attention,
        ATEN._scaled_dot_product_cudnn_attention,
    )
]

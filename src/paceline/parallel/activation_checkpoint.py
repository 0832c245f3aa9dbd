"""Activation checkpointing: recompute a block in the backward pass, fully or without its matrix products."""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.plan.plan import Plan


def recompute(module: nn.Module, plan: Plan) -> None:
    """Do not save activations inside of `module`, and recompute them in the backward pass.

    With recompute=selective, the results of matrix products and attention are saved, because they are
    expensive (Korthikanti et al., Reducing activation recomputation, 2022).
    """
    from torch.utils.checkpoint import checkpoint

    inner = module.forward
    selective = plan.recompute == "selective"
    options: dict[str, Any] = (
        {"context_fn": partial(_selective_contexts, is_repeated=plan.splits_backward)} if selective else {}
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    module.forward = forward


def _selective_contexts(is_repeated: bool) -> tuple[Any, Any]:
    """Return the contexts of a forward pass and of its recomputation.

    is_repeated: the pass may be recomputed several times.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    forward, recomputation = create_selective_checkpoint_contexts(SAVED_OPS)
    return forward, _RepeatableRecompute(recomputation) if is_repeated else recomputation


@dataclass
class _RepeatableRecompute:
    """A recomputation that returns saved results in each backward pass.

    torch 2.13: the context deletes a saved result after its first use.
    """

    recomputation: Any

    def __enter__(self) -> None:
        self.saved = {operation: copy(results) for operation, results in self.recomputation.storage.items()}
        self.recomputation.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.recomputation.__exit__(*error)
        self.recomputation.storage.update(self.saved)


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

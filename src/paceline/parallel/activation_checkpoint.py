"""Activation checkpointing: recompute a block in the backward pass, fully or without its matrix products."""

import contextlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.fake import is_fake
from paceline.errors import PlanError
from paceline.plan.plan import Plan

Contexts = tuple[Any, Any]  # of a forward pass and of its recomputation


def recompute(module: nn.Module, plan: Plan, buffers_change: bool = True) -> None:
    """Do not save activations inside of `module`, and recompute them in the backward pass.

    With recompute=selective, the results of matrix products and attention are saved, because they are
    expensive (Korthikanti et al., Reducing activation recomputation, 2022).

    A recomputation reads buffers as the forward pass did, and does not change them a second time.
    buffers_change: False for a module whose forward pass is known to change none.
    """
    from torch.utils.checkpoint import checkpoint

    inner = module.forward
    selective = plan.recompute == "selective"
    unit = _UnitBuffers(module, plan) if buffers_change and has_buffers(module) else None
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(_selective_contexts, is_repeated=plan.splits_backward)
    if unit is not None:
        options["context_fn"] = partial(_contexts_with_buffers, unit, options.get("context_fn"))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    module.forward = forward


def has_buffers(module: nn.Module) -> bool:
    return any(True for _ in module.buffers())


def refuse_changed_buffers(module: nn.Module, plan: Plan, advice: str) -> None:
    """Let a recomputed module raise PlanError if its first forward pass in training changes a buffer."""
    inner = module.forward
    unit = _UnitBuffers(module, plan)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if unit.is_known:
            return inner(*args, **kwargs)
        passing = _PassBuffers(unit)
        with _Forward(passing):
            result = inner(*args, **kwargs)
        for at in unit.changing:
            changing, key = passing.places[at]
            raise PlanError(
                f"plan {plan}: a recomputed {type(changing).__name__} changes its buffer {key!r}, which "
                f"happens twice in compiled blocks; {advice}"
            )
        return result

    module.forward = forward


def _contexts_with_buffers(unit: "_UnitBuffers", context_fn: Any) -> Contexts:
    buffers = _PassBuffers(unit)
    contexts = (
        context_fn() if context_fn is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    )
    forward, recomputation = contexts
    return _InOrder([_Forward(buffers), forward]), _InOrder([_Recomputation(buffers), recomputation])


@dataclass
class _InOrder:
    """Contexts that are entered one after the other. They may be entered again."""

    contexts: Sequence[Any]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


class _UnitBuffers:
    """The buffers of a recomputed module. Its first forward pass shows which of them change."""

    def __init__(self, module: nn.Module, plan: Plan):
        self.module, self.plan = module, plan
        self.changing: set[int] = set()  # indices in `places`
        self.is_known = False  # whether a forward pass has ended

    def places(self) -> list[tuple[nn.Module, str]]:
        return [(module, key) for module in self.module.modules() for key in module._buffers]


class _PassBuffers:
    """The values that a forward pass finds in buffers that change."""

    def __init__(self, unit: _UnitBuffers):
        self.unit = unit
        self.places: list[tuple[nn.Module, str]] = []
        self.values: dict[int, Tensor | None] = {}  # by index in `places`

    def tensors(self) -> list[Tensor | None]:
        return [module._buffers[key] for module, key in self.places]


@dataclass
class _Forward:
    """Keeps the values of buffers before a forward pass. The first pass keeps all, to find which change."""

    buffers: _PassBuffers

    def __enter__(self) -> None:
        buffers, unit = self.buffers, self.buffers.unit
        buffers.places = unit.places() if unit.module.training else []
        self.before = buffers.tensors()
        self.versions = [tensor._version if tensor is not None else 0 for tensor in self.before]
        kept = unit.changing if unit.is_known else range(len(self.before))
        buffers.values = {
            at: tensor.clone() if tensor is not None and (unit.is_known or _has_values(tensor)) else tensor
            for at, tensor in enumerate(self.before)
            if at in kept
        }

    def __exit__(self, *error: Any) -> None:
        buffers, unit = self.buffers, self.buffers.unit
        if error[0] is not None or not unit.module.training:
            return
        for at, (before, after) in enumerate(zip(self.before, buffers.tensors(), strict=True)):
            if at in unit.changing:
                continue
            is_changed = after is not before or (after is not None and after._version != self.versions[at])
            kept = buffers.values.get(at)
            if not unit.is_known and kept is not None and after is not None and _has_values(after):
                is_changed |= after is not before or not torch.equal(after, kept)
            if is_changed and unit.is_known:
                module, key = buffers.places[at]
                raise PlanError(
                    f"plan {unit.plan}: a recomputed {type(module).__name__} changes its buffer {key!r}, "
                    "which it did not in its first forward pass; change it from the first pass on, or use "
                    "recompute=none"
                )
            if is_changed:
                unit.changing.add(at)
            else:
                buffers.values.pop(at, None)
        unit.is_known = True
        del self.before


@dataclass
class _Recomputation:
    """Gives a recomputation the values that the forward pass found, and restores the buffers after it."""

    buffers: _PassBuffers

    def __enter__(self) -> None:
        self.current = self.buffers.tensors()
        for at, value in self.buffers.values.items():
            module, key = self.buffers.places[at]
            module._buffers[key] = value.clone() if value is not None else None

    def __exit__(self, *error: Any) -> None:
        for (module, key), tensor in zip(self.buffers.places, self.current, strict=True):
            module._buffers[key] = tensor
        del self.current


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be compared; in a dry run only its version tells whether it changes."""
    return not tensor.is_meta and not is_fake(tensor)


def _selective_contexts(is_repeated: bool) -> Contexts:
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

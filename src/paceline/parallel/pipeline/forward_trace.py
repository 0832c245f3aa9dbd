"""The calls of parts in a forward pass, and the cuts that are possible between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.pipeline.buffers import BufferUse
from paceline.parallel.pipeline.capturing_hooks import HookCall


@dataclass(frozen=True)
class TensorMeta:
    """Shape and data type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_written: bool = False  # other code writes into the tensor

    def placeholder(self, device: torch.device) -> Tensor:
        """Return a tensor that must not be used: full of NaN, and without memory unless it is written to."""
        fill_value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        scalar = torch.full((), fill_value, dtype=self.dtype, device=device)
        return scalar.expand(self.shape).clone() if self.is_written else scalar.expand(self.shape)


@dataclass(frozen=True)
class PassedThrough:
    """An argument that a part returns unchanged."""

    index: int  # among the leaves of (args, kwargs)


@dataclass(frozen=True)
class Returned:
    """A tensor that a part returns, where a hook saw it."""

    index: int  # among the leaves of the output


@dataclass
class PartCall:
    """A call of a part."""

    part: str
    crossing: list[int]  # those leaves of (args, kwargs) that cross a cut before this call
    crossing_metas: list[TensorMeta]  # of these leaves
    # Leaves and structure; TensorMeta or PassedThrough stand for tensors.
    output: tuple[list[Any], Any] = ([], None)
    is_replicated: bool = False  # does not depend on parameters: every stage makes this call
    flops: int = 0  # until the next call
    # Hash of the operations until the next call: with shapes, and whether they run with gradients or are
    # recomputed.
    ops_hash: int = 0
    is_written: bool = False  # other code writes into its output
    # Calls of hooks that keep what they see; their leaves are as those of the output, or Returned.
    hooks: list[HookCall] = field(default_factory=list)


@dataclass
class ForwardTrace:
    """The calls of parts in a forward pass on placeholders, and the cuts that are possible between them."""

    calls: list[PartCall] = field(default_factory=list)
    barred: dict[int, str] = field(default_factory=dict)  # cut -> why it is not possible
    # Parameter -> the calls during or after which it is used.
    uses: dict[str, set[int]] = field(default_factory=dict)
    # Parameters that are also used outside of the calls of their part.
    used_outside: set[str] = field(default_factory=set)
    buffers: dict[str, BufferUse] = field(default_factory=dict)
    barred_by_buffers: set[int] = field(default_factory=set)

    @property
    def cuts(self) -> list[int]:
        """The calls that a stage may begin with."""
        return [
            at
            for at, call in enumerate(self.calls)
            if at and not call.is_replicated and at not in self.barred
        ]

    def bar_tensor_parallel_pairs(self, styles: Mapping[str, str]) -> None:
        """Bar cuts between a layer that tp splits by columns and the layer that takes its split features.

        `styles`: split style by module name.
        """
        features_are_split = False
        for at, call in enumerate(self.calls):
            own = {style for name, style in styles.items() if f"{name}.".startswith(f"{call.part}.")}
            if features_are_split:
                self.barred.setdefault(at, f"{call.part} takes features that tp has split")
            features_are_split = "row" not in own and (features_are_split or "column" in own)

    def bar_buffer_cuts(self) -> None:
        """Bar cuts that separate uses of a buffer that must be in the same stage."""
        for name, use in self.buffers.items():
            for cut in use.together:
                self.barred_by_buffers.add(cut)
                self.barred.setdefault(cut, f"buffer {name} is changed, and is used before and after it")

    def merge_evaluation(self, evaluation: "ForwardTrace") -> None:
        """Bar also the cuts that an evaluation bars, if it calls the same parts."""
        if [call.part for call in self.calls] != [call.part for call in evaluation.calls]:
            return
        for name, use in evaluation.buffers.items():
            self.buffers.setdefault(name, BufferUse()).add(use)
        self.barred |= {cut: why for cut, why in evaluation.barred.items() if cut not in self.barred}
        self.barred_by_buffers |= evaluation.barred_by_buffers
        self.bar_buffer_cuts()

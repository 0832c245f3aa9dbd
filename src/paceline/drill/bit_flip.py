"""Flip one bit in the tensors of a rank: in a weight, a gradient, an activation or the data of a step.

The drill writes a request, which the wrapped task of a rank reads; the rank writes what it flipped.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.batch import find_tensors
from paceline.distributed.dtensor import local_tensor

FLIP, FLIPPED = "flip.json", "flipped.txt"
MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Target = Literal["weight", "gradient", "activation", "data"]


@dataclass(frozen=True, kw_only=True)
class BitFlip:
    """The request: which rank flips a bit, of what, in which step of its first start."""

    target: Target
    rank: int
    step: int  # counted from 1
    seed: int


def write_flip(folder: Path, flip: BitFlip) -> None:
    """Write a request into the folder of a training."""
    (folder / FLIP).write_text(json.dumps(asdict(flip)))


def read_flipped(folder: Path) -> str | None:
    """Return what a rank flipped, or None."""
    path = folder / FLIPPED
    return path.read_text() if path.exists() else None


def flip_bit(tensors: Iterable[Tensor], rng: random.Random, lasts: bool = True) -> str | None:
    """Flip a random bit of the mantissa of a random element, and return which; None without any element.

    The exponent stays, since a huge number ends the training by itself.
    lasts: whether the element keeps its value until it is compared. Otherwise the bit is the highest of the
    mantissa of a number that is not 0, so that rounding does not remove the error at once.
    """
    candidates = [
        tensor for tensor in tensors if tensor.dtype in MANTISSA_BITS and local_tensor(tensor).numel()
    ]
    if not candidates:
        return None
    at = rng.randrange(len(candidates))
    # Through its memory: autograd does not see the change, as it does not see that of a broken memory.
    tensor = local_tensor(candidates[at]).data
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.permute(_memory_order(tensor)).view(-1)
    bits = flat.view(INTEGERS[tensor.element_size()])
    mantissa_bits = MANTISSA_BITS[tensor.dtype]
    element, bit = rng.randrange(bits.numel()), rng.randrange(mantissa_bits)
    if not lasts:
        bit = mantissa_bits - 1
        others = flat.nonzero().flatten()
        element = int(others[rng.randrange(len(others))]) if len(others) else element
    bits[element] ^= 1 << bit
    return f"bit {bit} of element {element} of tensor {at}"


def _memory_order(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


class RankFlip:
    """The flip of this rank, if the folder has a request for it. Steps are updates of an optimizer."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._flip: BitFlip | None = None
        self._has_read = False
        self._steps = 0  # updates done by the optimizer that updated last
        self._depth = 0  # of nested optimizers
        self._counts: Counter[int] = Counter()  # updates by optimizer
        self._params: list[Tensor] = []
        if (folder / FLIP).exists():
            register_optimizer_step_pre_hook(self._before_update)
            register_optimizer_step_post_hook(self._after_update)
            register_module_forward_pre_hook(self._before_forward)

    def _read(self) -> BitFlip | None:
        """Return the request, if it is for this rank and not done. The process may be forked before."""
        if not self._has_read and "RANK" in os.environ:
            self._has_read = True
            flip = BitFlip(**json.loads((self.folder / FLIP).read_text()))
            is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            self._flip = flip if is_first_start and os.environ["RANK"] == str(flip.rank) else None
        return self._flip

    def _before_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._steps = self._counts[id(optimizer)]
        self.flip("gradient", [parameter.grad for parameter in self._params if parameter.grad is not None])

    def _after_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._counts[id(optimizer)] += 1
            self._steps = self._counts[id(optimizer)]

    def _before_forward(self, *arguments: object) -> None:
        if torch.is_grad_enabled():
            self.flip("weight", self._params)

    def flip(self, target: Target, value: Any) -> None:
        """Flip a bit of a tensor in `value`, if this is the target, the rank and the step of the request."""
        flip = self._read() if (self.folder / FLIP).exists() else None
        if flip is None or target != flip.target or self._steps != flip.step - 1:
            return
        rng = random.Random(flip.seed)
        if (what := flip_bit(find_tensors(value), rng, lasts=target == "weight")) is not None:
            (self.folder / FLIPPED).write_text(f"{what}, step {flip.step}")
            self._flip = None

"""Updates of a large tensor by code that torch.compile makes, which reads and writes each tensor once."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paceline.parallel.compile import check_compiler_cache

# Elements from which compiled code updates a tensor. A call takes as long as plain operations on so many.
COMPILED_ELEMENTS = 2**16

CompiledUpdate = Callable[..., None]  # of flat tensors and a tensor of numbers, in place


@cache
def compile_update(update: CompiledUpdate) -> CompiledUpdate:
    """Return the compiled update, for tensors of any length.

    Raises LaunchError if another user owns the compiler's cache.
    """
    check_compiler_cache()
    return torch.compile(update, dynamic=True, fullgraph=True)


def approach_(means: Tensor, values: Tensor, rate: Tensor) -> None:
    """Add rate × (value - mean) to each mean. To be compiled.

    torch 2.13: compiled code of lerp chooses between two formulas for each element, which takes 10 % longer.
    """
    means.add_(rate * (values - means))

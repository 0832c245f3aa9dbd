"""Compares buffers between data ranks, to report those that forward passes change in different ways."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.data_parallel.reduced_buffers import list_first

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
PIECE = 2**20  # elements that are hashed at a time
ODD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio; multiplication wraps around


class BufferComparison:
    """Finds buffers whose values differ between the data ranks, each once.

    A comparison reads all buffers, so it is due after 1, 2, 4, 8, … steps.

    names: buffers to compare, the same on all ranks. held: those that this rank has.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], held: Collection[str], device: torch.device):
        self.model, self.names, self.held, self.device = model, list(names), {*held}, device

    def is_due(self, steps: int) -> bool:
        """Return whether to compare after so many steps of this process."""
        return bool(self.names) and steps & (steps - 1) == 0

    def find(self) -> list[str]:
        """Return the names of buffers that differ. A collective of all ranks."""
        buffers = dict(self.model.named_buffers())
        hashes = torch.full((2, len(self.names)), -(2**62), dtype=torch.int64, device=self.device)
        for at, name in enumerate(self.names):
            if name in self.held and name in buffers:
                value = _hash(buffers[name])
                hashes[0, at], hashes[1, at] = value, -value
        dist.all_reduce(hashes, dist.ReduceOp.MAX)
        largest, smallest = hashes[0], -hashes[1]
        is_held = hashes[0] > -(2**62)
        different = ((largest != smallest) & is_held).tolist()
        found = [name for name, differs in zip(self.names, different, strict=True) if differs]
        self.names = [name for name in self.names if name not in found]
        return found


def describe_different_buffers(names: Sequence[str]) -> str:
    """Return what to report of buffers that differ between data ranks."""
    what = f"buffers {list_first(names)} have" if len(names) > 1 else f"buffer {names[0]} has"
    return (
        f"{what} different values on the data ranks, other than in one process; declare in layout().buffers "
        "how the changes combine: 'mean', 'sum' or 'none'"
    )


@torch.no_grad()
def _hash(tensor: Tensor) -> Tensor:
    """Return a hash of shape and bits of a tensor, an int64 scalar of magnitude below 2^62."""
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.tensor(hash(tuple(tensor.shape)) % 2**61, dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), PIECE):
        piece = bits[begin : begin + PIECE].to(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + piece.numel(), device=tensor.device)
        mixed = (piece ^ (places * ODD)) * ODD
        total = total + (mixed ^ (mixed >> 29)).sum()
    return (total * ODD) >> 2

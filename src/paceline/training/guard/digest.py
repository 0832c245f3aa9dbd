"""Digest the bits of tensors on their device, in one reading pass."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from paceline.distributed.dtensor import local_tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_BYTES = 8
WIDTH = 1024  # blocks of a tensor: the words of a block are added
SMALL = 2**16  # elements up to which tensors of one type are digested together
ODD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio; multiplication wraps around


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a digest of the local bits of tensors, an int64 scalar on their device.

    The digest is a sum of the words, each times an odd number, modulo 2^64. So each single flipped bit
    changes it for certain, and unrelated differences escape with a chance of about 2^-64. In tensors of more
    than SMALL elements, neighbors have the same number: opposite changes of the same bit in two neighbors
    escape. Equal tensors in an equal order have equal digests.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    sums: list[Tensor] = []
    for tensor in (part for whole in tensors for part in find_plain_parts(whole)):
        if tensor.numel() <= SMALL:
            small.setdefault(tensor.dtype, []).append(tensor)
        else:
            sums.append(_sum_words(view_bits(tensor, in_memory_order=True)))
    # One call joins many small tensors, since a view of each as integers would take longer than its digest.
    sums += [_sum_words(view_bits(_flatten_dense_tensors(parts))) for parts in small.values()]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return (torch.stack(sums) * _odd_numbers(len(sums), sums[0].device)).sum()


def find_plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of which a tensor consists on this rank: several if it is quantized."""
    local: Any = local_tensor(tensor).detach()
    if type(local) in (Tensor, nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
        if local.layout == torch.strided:
            yield local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from find_plain_parts(getattr(local, name))


def view_bits(tensor: Tensor, in_memory_order: bool = False) -> Tensor:
    """Return the elements of the local part of a tensor as integers, flat."""
    local = local_tensor(tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    if in_memory_order and local.dim() == 4 and not local.is_contiguous():
        local = local.permute(0, 2, 3, 1)  # channels_last, without a copy
    return local.contiguous().reshape(-1).view(INTEGERS[local.element_size()])


def _sum_words(bits: Tensor) -> Tensor:
    per_word = WORD_BYTES // bits.element_size()
    if bits.storage_offset() % per_word:
        bits = bits.clone()
    whole = bits.numel() // (per_word * WIDTH) * per_word * WIDTH
    rest = bits[whole:].to(torch.int64)
    odd = _odd_numbers(WIDTH * (1 + WORD_BYTES), bits.device)
    total = (rest * odd[WIDTH : WIDTH + rest.numel()]).sum()
    if whole:
        blocks = bits[:whole].view(torch.int64).view(WIDTH, -1).sum(1)
        total = total + (blocks * odd[:WIDTH]).sum()
    return total


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return (torch.arange(1, count + 1, dtype=torch.int64, device=device) * ODD) | 1

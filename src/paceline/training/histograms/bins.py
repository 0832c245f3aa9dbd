"""The common bins of all histograms, and the bin of each value."""

import functools

import torch
from torch import Tensor

BINS_PER_DECADE = 10
SMALLEST, LARGEST = -8, 8  # exponents of ten: the smallest and the largest magnitude that have bins

_EXPONENTS = range(SMALLEST * BINS_PER_DECADE, LARGEST * BINS_PER_DECADE + 1)
_POSITIVE = [10.0 ** (exponent / BINS_PER_DECADE) for exponent in _EXPONENTS]
# Upper ends of the bins, which belong to them, besides the last, which has what is larger.
LIMITS = [*(-limit for limit in reversed(_POSITIVE)), *_POSITIVE]
UPPER_ENDS = (*LIMITS, float("inf"))
NUM_BINS = len(UPPER_ENDS)

# For each type: integers of the same size, and the lowest bits of the mantissa, all but three.
_BITS = {torch.float32: (torch.int32, 20, 2**12), torch.float64: (torch.int64, 49, 2**15)}


@functools.cache
def bin_finder(dtype: torch.dtype, device: torch.device) -> "BinFinder":
    """Return the finder of a type on a device. Its tables take longer than finding the bins of a weight."""
    return BinFinder(dtype, device)


class BinFinder:
    """Finds the bins of finite values of a type: float32 or float64.

    The sign, the exponent and three bits of the mantissa select a cell, the largest values of which are at
    most 1.125 times the smallest. So a cell has at most one limit of the bins, which are 1.26 apart: a lookup
    and a comparison take a third of the time of a binary search.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        integers, self._shift, cells = _BITS[dtype]
        self._integers, self._half = integers, cells // 2
        limits = torch.tensor(LIMITS, dtype=torch.float64)
        keys = torch.arange(-self._half, self._half, dtype=torch.int64)
        # The smallest value of a cell; of a negative one, it has the largest magnitude.
        bits = (keys << self._shift) | torch.where(keys < 0, (1 << self._shift) - 1, 0)
        smallest = bits.to(integers).view(dtype).double().nan_to_num()
        base = torch.bucketize(smallest, limits)
        # A value is at most a limit if it is at most the next smaller number of its own type.
        ends = limits.to(dtype)
        below = ends.nextafter(ends.new_tensor(-torch.inf))
        ends = torch.where(ends.double() > limits, below, ends)
        self._ends = torch.cat([ends, ends.new_tensor([torch.inf])])[base].to(device)
        self._base = base.to(torch.int32).to(device)

    def find(self, values: Tensor) -> Tensor:
        """Return the number of the bin of each value."""
        cells = (values.view(self._integers) >> self._shift).add_(self._half)
        return self._base.index_select(0, cells).add_(values > self._ends.index_select(0, cells))

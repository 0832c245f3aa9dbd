"""Counts of the elements of tensors in common bins, which add up over shards and ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.report.histogram import Histogram

BINS_PER_DECADE = 10
SMALLEST, LARGEST = -8, 8  # exponents of ten: the smallest and the largest magnitude that have bins
CHUNK = 2**22  # elements that are sorted into bins at a time

_EXPONENTS = range(SMALLEST * BINS_PER_DECADE, LARGEST * BINS_PER_DECADE + 1)
_POSITIVE = [10.0 ** (exponent / BINS_PER_DECADE) for exponent in _EXPONENTS]
# Upper ends of the bins, which belong to them. The last bin, of what is larger, has none.
LIMITS = [*(-limit for limit in reversed(_POSITIVE)), *_POSITIVE]
NUM_BINS = len(LIMITS) + 1


class TensorCounts:
    """The counts of several tensors, which are known by their names on all ranks.

    Values that are not finite are not counted.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.rows = {name: row for row, name in enumerate(names)}
        self._limits = torch.tensor(LIMITS, dtype=torch.float64, device=device)
        # The last two columns are the sum and the sum of the squares. Counts are exact to 2**53.
        self._counts = self._limits.new_zeros(len(names), NUM_BINS + 2)
        self._extremes = self._limits.new_full((len(names), 2), -torch.inf)  # the largest of -x and of x

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor, scale: float = 1.0) -> None:
        """Count the elements of a tensor divided by `scale`."""
        row = self.rows[name]
        for part in tensor.detach().reshape(-1).split(CHUNK):
            values = part.double() / scale
            values = values[values.isfinite()]
            if not values.numel():
                continue
            bins = torch.bucketize(values, self._limits, out_int32=True)
            self._counts[row, :NUM_BINS] += torch.bincount(bins, minlength=NUM_BINS)
            self._counts[row, NUM_BINS] += values.sum()
            self._counts[row, NUM_BINS + 1] += values.square().sum()
            extremes = torch.stack([-values.min(), values.max()])
            self._extremes[row] = torch.maximum(self._extremes[row], extremes)

    def reduce(self) -> dict[str, Histogram]:
        """Return the histograms of the tensors with elements, over all ranks. A collective."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._counts)
            dist.all_reduce(self._extremes, dist.ReduceOp.MAX)
        counts, extremes = self._counts.tolist(), self._extremes.tolist()
        return {
            name: Histogram(
                counts=tuple(map(int, counts[row][:NUM_BINS])),
                limits=(*LIMITS, float("inf")),
                sum=counts[row][NUM_BINS],
                sum_squares=counts[row][NUM_BINS + 1],
                min=-extremes[row][0],
                max=extremes[row][1],
            )
            for name, row in self.rows.items()
            if any(counts[row][:NUM_BINS])
        }

"""Counts of the elements of tensors in common bins, which add up over shards and ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.report.tensorboard.histogram import Histogram
from paceline.training.histograms.bins import NUM_BINS, UPPER_ENDS, bin_finder

CHUNK = 2**20  # elements that are sorted into bins at a time


class TensorCounts:
    """The counts of several tensors, which are known by their names on all ranks.

    Values that are not finite are not counted.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.rows = {name: row for row, name in enumerate(names)}
        # The last two columns are the sum and the sum of the squares. Counts are exact to 2**53.
        self._counts = torch.zeros(len(names), NUM_BINS + 2, dtype=torch.float64, device=device)
        self._extremes = self._counts.new_full((len(names), 2), -torch.inf)  # the largest of -x and of x

    def add(self, name: str, tensor: Tensor) -> None:
        """Count the elements of a tensor."""
        self.add_all([(name, tensor)])

    @torch.no_grad()
    def add_all(self, tensors: Iterable[tuple[str, Tensor]], scale: float = 1.0) -> None:
        """Count the elements of tensors, divided by `scale`. Small tensors are counted together."""
        group: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for name, tensor in tensors:
            is_double = tensor.dtype == torch.float64 or scale != 1.0
            dtype = torch.float64 if is_double else torch.float32
            for part in tensor.detach().reshape(-1).split(CHUNK):
                of_type, row = group.setdefault(dtype, []), self.rows[name]
                size = sum(other.numel() for _, other in of_type) + part.numel()
                if size > CHUNK or any(row == other for other, _ in of_type):
                    self._count(of_type)
                    of_type.clear()
                values = part.to(dtype)
                of_type.append((row, values / scale if scale != 1.0 else values))
        for of_type in group.values():
            self._count(of_type)

    def _count(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Count the elements of parts of different rows, all of the same type."""
        parts = [(row, part) for row, part in parts if part.numel()]
        values = torch.cat([part for _, part in parts]) if parts else None
        if values is None:
            return
        if not values.sum().isfinite():
            finite = [(row, part[part.isfinite()]) for row, part in parts]
            if any(len(of_part) < len(part) for (_, of_part), (_, part) in zip(finite, parts, strict=True)):
                self._count(finite)
                return
        device = values.device
        bins = bin_finder(values.dtype, device).find(values)
        lengths = torch.tensor([len(part) for _, part in parts], device=device)
        if len(parts) > 1:
            offsets = torch.arange(0, len(parts) * NUM_BINS, NUM_BINS, dtype=torch.int32, device=device)
            bins += offsets.repeat_interleave(lengths, output_size=len(values))
        counts = torch.bincount(bins, minlength=len(parts) * NUM_BINS).view(len(parts), NUM_BINS)
        doubles = values.double()
        sums = [_reduce(summands, "sum", lengths) for summands in (doubles, doubles.square())]
        rows = torch.tensor([row for row, _ in parts], device=device)
        self._counts.index_add_(0, rows, torch.cat([counts, *(part[:, None] for part in sums)], dim=1))
        extremes = torch.stack([-_reduce(doubles, "min", lengths), _reduce(doubles, "max", lengths)], dim=1)
        self._extremes[rows] = torch.maximum(self._extremes[rows], extremes)

    def discard(self, name: str) -> None:
        """Leave a tensor out of the result on all ranks."""
        self._counts[self.rows[name]] = torch.nan

    def reduce(self) -> dict[str, Histogram]:
        """Return the histograms of the tensors with elements, over all ranks. A collective."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._counts)
            dist.all_reduce(self._extremes, dist.ReduceOp.MAX)
        sums, extremes = self._counts[:, NUM_BINS:].tolist(), self._extremes.tolist()
        numbers = self._counts[:, :NUM_BINS].nan_to_num().long().tolist()
        return {
            name: Histogram(
                counts=tuple(numbers[row]),
                limits=UPPER_ENDS,
                sum=sums[row][0],
                sum_squares=sums[row][1],
                min=-extremes[row][0],
                max=extremes[row][1],
            )
            for name, row in self.rows.items()
            if any(numbers[row])
        }


def _reduce(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    """Return the sum or the extremes of each part of the values."""
    if len(lengths) > 1:
        return torch.segment_reduce(values, how, lengths=lengths)
    whole = values.sum() if how == "sum" else values.min() if how == "min" else values.max()
    return whole[None]

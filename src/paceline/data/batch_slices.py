"""Which samples of each step a rank reads. Their order is a pure function of the seed and their number.

The state is one integer. The samples of a training are numbered 0, 1, 2, … over all epochs. Step s consumes
the numbers s·batch to (s+1)·batch - 1, for any number of ranks. They are divided into micro-batches, and
each micro-batch into one contiguous slice per rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paceline.data.order import Numbers, Order
from paceline.spec import StepBatches

CHUNK = 8192  # sample numbers whose order is computed at a time


@dataclass(frozen=True)
class RankBatchSlice:
    """The samples that one rank consumes.

    Micro-batch m of a step begins at step·batch + m·(batch / microbatches).

    The slices of the ranks differ by one sample at most. Only uneven plans and a parameter server allow
    different slices.

    batch         samples of the global batch
    microbatches  number of micro-batches per step
    rank          data rank, counted from 0
    ranks         number of data ranks
    batches       the batch of each step, if it changes
    """

    batch: int
    microbatches: int
    rank: int
    ranks: int
    batches: StepBatches | None = None

    @property
    def share(self) -> int:
        """The number of samples of a micro-batch on this rank, in steps with the whole batch."""
        return self._begin(self.rank + 1) - self._begin(self.rank)

    def of_step(self, step: int) -> "RankBatchSlice":
        """Return the slice with the batch of a step."""
        return self if self.batches is None else replace(self, batch=self.batches.batch_of(step))

    def next_change(self, step: int) -> int | None:
        """Return the first step after `step` that has another batch, or None."""
        return self.batches.next_change(step) if self.batches is not None else None

    def _begin(self, rank: int) -> int:
        return self.batch // self.microbatches * rank // self.ranks

    def numbers(self, step: int) -> Numbers:
        """Return the numbers of the samples of a step on this rank, of shape (microbatches, share)."""
        own = self.of_step(step)
        before = step * self.batch if self.batches is None else self.batches.samples_before(step)
        return (
            before
            + own._begin(self.rank)
            + np.arange(self.microbatches)[:, None] * (own.batch // self.microbatches)
            + np.arange(own.share)[None, :]
        )


def training_parts(
    part: RankBatchSlice, order: Order, first_step: int, steps: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (numbers, indices) of each micro-batch of this rank, from step `first_step` until `steps`."""
    steps_per_chunk = max(1, CHUNK // (part.microbatches * part.share))
    begin = end = first_step
    while begin < steps:
        end = min(begin + steps_per_chunk, steps, part.next_change(begin) or steps)
        numbers = np.stack([part.numbers(step) for step in range(begin, end)])
        begin = end
        indices = order.indices(numbers.ravel()).reshape(numbers.shape)
        for step_numbers, step_indices in zip(numbers.tolist(), indices.tolist(), strict=True):
            yield from zip(step_numbers, step_indices, strict=True)


def validation_parts(samples: int, batch: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Yield the indices of the samples of each batch on this rank; each sample is on one rank.

    All ranks have the same number of batches, some of which may be empty.
    """
    share = -(-batch // ranks)
    for begin in range(0, samples, batch):
        end = min(begin + batch, samples)
        yield list(range(min(begin + rank * share, end), min(begin + (rank + 1) * share, end)))

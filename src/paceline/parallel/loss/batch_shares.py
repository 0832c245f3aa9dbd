"""How data ranks and micro-batches divide a global batch, and the all-gather of its tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.shared_exchange import default_group_name, find_exchange, is_whole_world
from paceline.torch_compat import all_gather_single


@dataclass(frozen=True)
class BatchShares:
    """How the samples of a global batch are divided.

    counts        number of samples of a micro-batch, by data rank
    microbatches  number of micro-batches
    rank          this data rank
    group         ranks with the same part of the model, in the order of `counts`; None: all
    """

    counts: tuple[int, ...]
    microbatches: int
    rank: int
    group: dist.ProcessGroup | None

    @property
    def own(self) -> int:
        """Samples of a micro-batch on this rank."""
        return self.counts[self.rank]

    @property
    def parts(self) -> int:
        """Number of parts of the batch."""
        return len(self.counts) * self.microbatches

    @property
    def samples(self) -> int:
        """Samples of the global batch."""
        return sum(self.counts) * self.microbatches

    def own_rows(self, microbatch: int) -> slice:
        """Return the rows of a micro-batch of this rank among those of the global batch."""
        begin = microbatch * sum(self.counts) + [0, *accumulate(self.counts)][self.rank]
        return slice(begin, begin + self.own)

    def gather(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the rows of the global batch of each tensor, in the order of one process.

        One all-gather of the bytes of all tensors.

        tensors: of each, its rows on this rank by micro-batch. Dtypes and sizes of rows are those of all
        ranks.
        """
        if len(self.counts) == 1:
            return [torch.cat(list(rows)) if len(rows) > 1 else rows[0] for rows in tensors]
        largest = max(self.counts) * self.microbatches
        shapes = [(largest, *rows[0].shape[1:]) for rows in tensors]
        sizes = [rows[0].element_size() for rows in tensors]
        # The largest elements come first: then each tensor begins at a multiple of its own element size.
        order = sorted(range(len(tensors)), key=lambda index: -sizes[index])
        bounds = [0, *accumulate(math.prod(shapes[index]) * sizes[index] for index in order)]
        num_bytes = -(-bounds[-1] // sizes[order[0]]) * sizes[order[0]]
        sent = tensors[0][0].new_empty(
            num_bytes, dtype=torch.uint8
        )  # bytes, since back ends lack some dtypes
        for at, index in enumerate(order):
            rows = tensors[index]
            target = sent[bounds[at] : bounds[at + 1]].view(rows[0].dtype).view(shapes[index])
            for microbatch, own in enumerate(rows):
                target[microbatch * self.own : (microbatch + 1) * self.own] = own
        # zeros, since a dry run receives nothing, and a task may use the numbers of a batch as indices
        by_rank = sent.new_zeros(len(self.counts), num_bytes)
        self._gather_bytes(by_rank, sent)
        gathered = {
            index: self._join(
                by_rank[:, bounds[at] : bounds[at + 1]]
                .view(tensors[index][0].dtype)
                .view(len(self.counts), *shapes[index])
            )
            for at, index in enumerate(order)
        }
        return [gathered[index] for index in range(len(tensors))]

    def _gather_bytes(self, by_rank: Tensor, sent: Tensor) -> None:
        """Write the bytes of each rank to its row of `by_rank`. A collective."""
        if sent.device.type == "cpu" and is_whole_world(self.group) and find_exchange() is not None:
            torch.ops.paceline.gather_through_memory_(by_rank, sent, default_group_name())
        else:
            all_gather_single(by_rank.view(-1), sent, group=self.group)

    def _join(self, by_rank: Tensor) -> Tensor:
        """Return the rows of the global batch from those of each rank, of shape (ranks, rows, …)."""
        if self.microbatches == 1 and len({*self.counts}) == 1:
            return by_rank.flatten(0, 1)
        return torch.cat(
            [
                by_rank[rank, microbatch * count : (microbatch + 1) * count]
                for microbatch in range(self.microbatches)
                for rank, count in enumerate(self.counts)
            ]
        )

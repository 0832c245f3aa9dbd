"""Losses of micro-batches that a second data rank computes too, from samples that it reads itself."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.ragged import agree_on_longest
from paceline.data.samples import Batch
from paceline.training.guard.digest import digest
from paceline.training.guard.verdict import Corruption
from paceline.training.optimization.batches import changing_batches
from paceline.training.prepared import RankContext
from paceline.training.step.step import TrainingStep
from paceline.training.training_data import TrainingData


class LossRecomputation:
    """Computes the loss of the first micro-batch of a step again, for this rank and for the next rank.

    Before the step, since both need the weights before its update. The plan divides only the batch.
    """

    def __init__(self, context: RankContext, step: TrainingStep, data: TrainingData):
        self.context, self.update, self.data = context, step, data
        self.step = 0
        self._recomputed: list[Tensor] = []  # digests of the losses of this rank and of the next
        self._own: Tensor | None = None
        step.on_loss = self._record

    def begin(self, step: int) -> None:
        """Compute both losses. `step`: steps done before. A collective."""
        self.step, self._own = step + 1, None
        own = self.context.world.rank
        ranks = [own, (own + 1) % self.context.plan.dp]
        losses = [
            self.update.recompute_loss(self._read(step, rank), step, self.context.plan.place(rank))
            for rank in ranks
        ]
        self._recomputed = [digest([loss]) for loss in losses]

    def _read(self, step: int, rank: int) -> Batch:
        """Return the first micro-batch of a rank in a step, read again."""
        spec, plan = self.context.spec, self.context.plan
        parts = training_parts(
            RankBatchSlice(spec.batch, plan.microbatches, rank, plan.dp, changing_batches(spec)),
            self.data.order,
            step,
            step + 1,
        )
        agree = agree_on_longest(None, self.context.device)
        source = batches(self.data.training, parts, self.context.device, 0, 1, plan.microbatches, agree)
        first, *_ = [next(source) for _ in range(plan.microbatches)]
        return first

    def _record(self, microbatch: int, loss: Tensor) -> None:
        if microbatch == 0 and self._recomputed:
            self._own = digest([loss])

    def compare(self) -> list[Corruption]:
        """Return the faults that the losses of the last step show. A collective."""
        if self._own is None:
            return []
        row = torch.stack([self._own, *self._recomputed])
        self._recomputed = []
        rows = [torch.empty_like(row) for _ in range(self.context.plan.dp)]
        dist.all_gather(rows, row)
        return find_wrong_losses(torch.stack(rows).tolist(), self.step)


def find_wrong_losses(rows: Sequence[Sequence[int]], step: int) -> list[Corruption]:
    """Return the faults that digests of losses show.

    rows: by rank, the digests of its loss, of the same loss computed again, and of that of the next rank.
    """
    found = []
    for rank, (own, again, _) in enumerate(rows):
        previous = (rank - 1) % len(rows)
        other = rows[previous][2]
        if own == again == other:
            continue
        if other in (own, again):
            what = f"rank {rank} did not repeat its loss of step {step}, and rank {previous} did"
            found.append(Corruption((rank,), step, what))
        else:
            ranks = tuple(sorted({rank, previous}))
            what = (
                f"ranks {ranks[0]} and {ranks[-1]} compute different losses from the same samples in "
                f"step {step}"
            )
            found.append(Corruption(ranks, step, what))
    return found

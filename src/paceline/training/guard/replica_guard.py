"""Compares digests of weights between ranks, and ends the training if a rank holds other bits."""

import platform
from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batch import find_tensors
from paceline.distributed.dtensor import is_materialized, local_tensor
from paceline.errors import CorruptionError, TaskError
from paceline.parallel.data_parallel.fsdp import drop_gathered
from paceline.parallel.data_parallel.reduced_buffers import find_batch_norm_buffers
from paceline.spec.guard import WeightGuard
from paceline.training.guard.check import find_copy, has_equal_state, has_replicas
from paceline.training.guard.digest import digest
from paceline.training.guard.recompute import LossRecomputation
from paceline.training.guard.suspects import Suspect, record_suspects
from paceline.training.guard.verdict import Corruption, RankRecord, find_common_change, find_corruption
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.step.step import TrainingStep
from paceline.training.training_data import TrainingData


@dataclass
class _Gathering:
    """Digests on their way from all ranks. `step`: steps done when they were computed."""

    step: int
    rows: list[Tensor]  # by rank
    work: dist.Work | None


class ReplicaGuard:
    """Follows the weights of this rank. All ranks call the methods in the same order.

    Digests stay on the device until a comparison, and travel while the next step runs, so that a step waits
    for nothing.

    first: steps done before this start.
    """

    def __init__(self, context: RankContext, prepared: PreparedTraining, data: TrainingData, first: int):
        guard: WeightGuard = context.spec.guard
        self.context, self.prepared, self.every = context, prepared, guard.every
        self.locates = guard.locate and isinstance(prepared.update, TrainingStep)
        self.has_replicas = has_replicas(context.plan)
        self.compared = first  # steps done at the last comparison without a fault
        self.found_at = first  # steps done when the digests of the last comparison were computed
        self.step = first
        self._gradients: list[Tensor] = []
        self._updated: list[Tensor] = []
        self._changed = torch.zeros((), dtype=torch.int64, device=context.device)
        self._gathering: _Gathering | None = None
        self._last: Tensor | None = None  # digest after the last update, of the weights that are followed
        self._marks: dict[str, tuple[int, int]] = {}  # of the weights before the step
        self._moving: set[str] = set()  # names of weights that the task itself changes between updates
        self.notes: list[str] = []  # for the user, which the loop reports
        self.recomputation: LossRecomputation | None = None
        if self.every is None:
            return
        if self.locates:
            prepared.step.after_backward.append(self._record_gradients)
        if guard.recompute:
            self.recomputation = LossRecomputation(context, prepared.step, data)

    def _is_compared(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def before_step(self, step: int) -> None:
        """Prepare a step. `step`: steps done before it. A collective if the guard recomputes losses."""
        self.step = step
        if self.locates:
            drop_gathered(self.prepared.model)  # by an evaluation: the marks are of the parts of ranks
            self._marks = self._mark_weights()
        if self.recomputation is not None and self._is_compared(step + 1):
            self.recomputation.begin(step)

    def _record_gradients(self) -> None:
        """Record the gradients, and whether the weights are as the last update left them."""
        if self.has_replicas:
            gradients = [
                parameter.grad for parameter in self.prepared.step.params if parameter.grad is not None
            ]
            self._gradients.append(digest(gradients))
        if self._last is None:
            return
        marks = self._mark_weights()
        moved = {name for name, mark in self._marks.items() if marks[name] != mark} - self._moving
        if moved:
            self._moving |= moved
            self.notes.append(
                f"forward() or loss() changes {min(moved)}, so guard.locate does not follow that weight on "
                f"rank {self.context.world.rank}"
            )
            return
        differs = (self._digest_weights(self._moving) != self._last) & (self._changed == 0)
        self._changed = torch.where(differs, self.step + 1, self._changed)

    def _mark_weights(self) -> dict[str, tuple[int, int]]:
        """Return for each weight what operations of torch change and broken memory does not."""
        return {
            name: (parameter._version, local_tensor(parameter).data_ptr())
            for name, parameter in self.prepared.model.named_parameters()
            if is_materialized(parameter)
        }

    def after_step(self, step: int) -> None:
        """Record the weights after a step. `step`: steps done."""
        self.step = step
        if self.locates:
            self._last = self._digest_weights(self._moving)
            if self.has_replicas:
                self._updated.append(self._digest_weights() if self._moving else self._last)

    def _digest_weights(self, without: Container[str] = ()) -> Tensor:
        """Return the digest of the weights of this rank, without those of some names."""
        return digest(
            parameter
            for name, parameter in self.prepared.model.named_parameters()
            if name not in without and is_materialized(parameter)
        )

    def _find_state(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer state on this device, in the same order on all ranks."""
        for optimizer in self.prepared.optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                values = optimizer.state.get(parameter, {})
                for tensor in find_tensors([values[key] for key in sorted(values, key=str)]):
                    yield tensor.to(self.context.device)

    def _find_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers and averages that Paceline keeps equal. Other buffers may differ by right."""
        model, reducer = self.prepared.model, self.prepared.step.buffers
        names = {buffer.name for buffer in reducer.buffers} if reducer is not None else set()
        if self.context.spec.batch_norm == "global":
            names |= find_batch_norm_buffers(model)
        for name, buffer in model.named_buffers():
            if name in names and is_materialized(buffer):
                yield buffer
        if self.prepared.operations is not None:
            yield from self.prepared.operations.averages.values()

    def compare(self, at_once: bool = False) -> list[Corruption]:
        """Return the faults of weights, gradients and losses that a comparison found. A collective.

        A comparison begins if it is time, and ends after the next step. It ends at once before a save, if the
        loss is not finite, and if the guard follows each step or recomputes losses. The result is the same on
        all ranks. Raises TaskError if the task itself changes weights between updates.
        """
        if self.every is None:
            return []
        found: list[Corruption] = []
        if self._gathering is not None and (at_once or self._gathering.step < self.step):
            found = self._finish(self._gathering)
        if found or self.step == self.compared or not (at_once or self._is_compared(self.step)):
            return found
        self._gathering = self._begin()
        if at_once or self.locates or self.recomputation is not None:
            found = self._finish(self._gathering)
        return found

    def _begin(self) -> _Gathering:
        """Begin one small all-gather of the digests of this rank."""
        none = torch.zeros_like(self._changed)
        # Again, since an evaluation may lie between the update and a save. It may leave parameters of
        # `fully_shard` whole, on all ranks.
        weights = self._digest_weights() if self.has_replicas else none
        optimizer = digest(self._find_state()) if has_equal_state(self.context.plan) else none
        buffers = digest(self._find_buffers()) if self.has_replicas else none
        present = [part.to(none.device) for part in (weights, self._changed, optimizer, buffers)]
        own = torch.stack([*present, *self._gradients, *self._updated])
        if self.context.world.size == 1:
            return _Gathering(self.step, [own], None)
        rows = [torch.empty_like(own) for _ in range(self.context.world.size)]
        return _Gathering(self.step, rows, dist.all_gather(rows, own, async_op=True))

    def _finish(self, gathering: _Gathering) -> list[Corruption]:
        """Wait for the digests of all ranks, and return the faults that they show."""
        if gathering.work is not None:
            gathering.work.wait()
        self._gathering = None
        records = [
            self._read_record(rank, row) for rank, row in enumerate(torch.stack(gathering.rows).tolist())
        ]
        if (changed_in := find_common_change(records)) is not None:
            raise TaskError(
                "the weights of all ranks changed outside of an update, before the update of step "
                f"{changed_in}: forward() or loss() changes them through .data; leave guard.locate out"
            )
        found = find_corruption(records, self.compared + 1)
        if self.recomputation is not None and self._is_compared(gathering.step):
            found += self.recomputation.compare()
        self.found_at = gathering.step
        if not found:
            self.compared = gathering.step
            self._gradients, self._updated = [], []
            self._changed = torch.zeros_like(self._changed)
        return found

    def _read_record(self, rank: int, row: list[int]) -> RankRecord:
        """Return what a rank recorded. row: its digests, in the order of `_begin`."""
        weights, changed_in, optimizer, buffers, *steps = row
        num_gradients = len(self._gradients)
        return RankRecord(
            copy=find_copy(self.context.plan, rank) if self.has_replicas else rank,
            weights=weights,
            changed_in=changed_in,
            optimizer=optimizer,
            buffers=buffers,
            gradients=tuple(steps[:num_gradients]),
            updated=tuple(steps[num_gradients:]),
        )

    def fail(self, found: list[Corruption]) -> None:
        """Record the faults in the run, and raise CorruptionError. A collective."""
        world, run = self.context.world, self.context.run
        hosts: list[str | None] = [platform.node()] * world.size
        if world.size > 1:
            dist.all_gather_object(hosts, platform.node())
        if run is not None and world.rank == _choose_writer(found, world.size):
            suspects = [
                Suspect(
                    rank=rank,
                    host=hosts[rank] or "",
                    step=self.found_at,
                    certain=fault.is_certain,
                    what=fault.what,
                )
                for fault in found
                for rank in fault.ranks
            ]
            record_suspects(run, suspects)
        on_hosts = " and ".join(sorted({hosts[rank] or "" for rank in found[0].ranks}))
        before = f"at step {self.compared} nothing was wrong; " if self.compared else ""
        hint = run.hint() if run is not None else "nothing was saved"
        raise CorruptionError(
            f"silent corruption, found after step {self.found_at}: {found[0].what}; {before}"
            f"test the memory and the processors of {on_hosts}; {hint}"
        )


def _choose_writer(found: list[Corruption], ranks: int) -> int:
    """Return the rank that records the faults: the first that no fault names, if there is one."""
    named = {rank for fault in found for rank in fault.ranks}
    return next((rank for rank in range(ranks) if rank not in named), 0)

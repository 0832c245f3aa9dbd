"""When a training saves checkpoints, which of them are kept, and what is reported of them."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from paceline.data.order import Order
from paceline.doctor.heartbeat import SAVE
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import CheckpointError
from paceline.events import Event, Failed, Saved
from paceline.run import RunFolder
from paceline.training.checkpoint.identity import describe_identity
from paceline.training.checkpoint.index import Index
from paceline.training.checkpoint.retention import delete_unfinished, prune
from paceline.training.checkpoint.save import Saver
from paceline.training.checkpoint.state import describe_tensors, find_buffers
from paceline.training.guard.checkpoint_digest import can_digest, digest_weights
from paceline.training.optimization.plateau import PlateauState
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.resume import resume
from paceline.training.stop_policy import StopState, read_score


class CheckpointPolicy:
    """Resumes a training from its last checkpoint and saves new ones in the background, one at a time.

    A checkpoint that cannot be written costs neither the training nor the checkpoints before. Without a run
    folder nothing is read or written. The methods are collectives: all ranks call them in the same order.

    order: of the training samples.
    """

    def __init__(
        self, context: RankContext, prepared: PreparedTraining, order: Order, heartbeat: HeartbeatWriter
    ):
        self.context, self.prepared, self.order, self.heartbeat = context, prepared, order, heartbeat
        self.run, self.spec = context.run, context.spec
        self.saver = (
            Saver(
                context.run,
                context.plan,
                context.world.rank,
                context.world.size,
                context.device,
                prepared.group,
            )
            if context.run is not None
            else None
        )
        self.resumed = resume(context, prepared, order)
        self.best = self.resumed.best
        self.is_requested = False  # all ranks agreed to save after this step
        self._saved_step = self.resumed.step
        self._saved_at = time.perf_counter()
        self._failure: str | None = None  # why the last checkpoint was not written

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of saves."""
        return self.saver.group if self.saver is not None else None

    def clean(self) -> None:
        """Delete what an earlier process left unfinished."""
        if self.run is not None and self.context.world.rank == 0 and self.run.ckpt.exists():
            delete_unfinished(self.run)

    def prepare(self) -> None:
        """Import in the background what a save needs."""
        if self.saver is not None:
            self.saver.prepare()

    def is_overdue(self) -> bool:
        """Return whether rank 0 should request a save, because the last save is `save.minutes` ago."""
        if self.saver is None or self.context.world.rank:
            return False
        return time.perf_counter() - self._saved_at > 60 * self.spec.save.minutes

    def take_due(self, step: int) -> bool:
        """Return whether to save after `step` steps, and forget that a save was requested."""
        every = self.spec.save.every
        is_due = self.is_requested or (every is not None and step % every == 0)
        self.is_requested = False
        return self.saver is not None and is_due

    def is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to save because these metrics are the best so far.

        Raises SpecError if `save.best` is none of them.
        """
        score = read_score(metrics, self.spec.save.best, "save.best")
        if math.isnan(score) or (self.best is not None and score >= self.best):
            return False
        self.best = score
        return self.saver is not None

    def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        stop: StopState | None = None,
        plateau: PlateauState | None = None,
    ) -> Iterator[Event]:
        """Start to save the state after `step` steps, once the save before is done.

        metrics: of this step. stop, plateau: of the evaluations so far.
        """
        assert self.saver is not None
        yield from self.report(wait=True)
        context, prepared = self.context, self.prepared
        state, rank_state = prepared.state(context.world.rank)
        loss_scale = prepared.update.loss_scale
        index = Index(
            step=step,
            samples=self.spec.batches.samples_before(step),
            epoch_samples=self.order.epoch_samples,
            task=self.spec.task,
            set=self.spec.set,
            plan=context.requested_plan,
            ranks=context.ranks,
            seed=self.spec.seed,
            order=self.order.describe(self.spec.batches.samples_before(step)),
            own=bool(rank_state),
            loss_scale=dataclasses.asdict(loss_scale) if loss_scale is not None else None,
            metrics=metrics,
            stop=stop if self.spec.stop.is_active else None,
            plateau=plateau,
            digests=self._digest_weights(),
            identity=describe_identity(self.spec, context.task, prepared.modules, prepared.optimizers),
            **describe_tensors(prepared.model),
        )
        self.saver.start(index, state, rank_state, find_buffers(prepared.model))
        self._saved_step, self._saved_at = step, time.perf_counter()

    def _digest_weights(self) -> dict[str, list[int]]:
        """Return the digests of the weights that a resume compares, if the request has a guard."""
        context = self.context
        if self.spec.guard.every is None or not can_digest(context.plan):
            return {}
        prepared = self.prepared
        return digest_weights(
            prepared.model, context.plan, context.world.rank, context.device, prepared.saved_elsewhere
        )

    def report(self, wait: bool) -> Iterator[Event]:
        """Yield the event of the save under way if it has ended.

        wait: until it has ended; the same on all ranks.
        """
        if wait:
            self.heartbeat.enter(SAVE)
        result = self.saver.result(wait) if self.saver is not None else None
        if result is None or self.run is None:
            return
        self._failure = result.error
        step = result.index.step
        if result.error is not None:
            yield Failed(
                what="save",
                step=step,
                message=f"checkpoint of step {step} was not written: {result.error}; {_last_good(self.run)}",
            )
            return
        if self.context.world.rank == 0:
            prune(self.run, self.spec.save.keep, self.spec.save.best)
        yield Saved(
            step=step,
            path=str(self.run.checkpoint(step).relative_to(self.run.path)),
            bytes=result.bytes,
            seconds=result.seconds,
            blocked_s=result.blocked_s,
        )

    def finish(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, float],
        stop: StopState | None = None,
        plateau: PlateauState | None = None,
    ) -> Iterator[Event]:
        """Save the last of `total` steps that was done, if it is not saved, and wait for it.

        Raises CheckpointError if it was not written.
        """
        if self.saver is None:
            return
        if self._saved_step != step:
            yield from self.save(step, metrics, stop, plateau)
        yield from self.report(wait=True)
        self.saver.close()
        if self._failure is not None:
            assert self.run is not None
            raise CheckpointError(
                f"the training came to step {step} of {total}, but its last checkpoint was not written: "
                f"{self._failure}; {_last_good(self.run)}; make room in {self.run.ckpt}, then: paceline "
                f"resume {self.run.path}"
            )


def _last_good(run: RunFolder) -> str:
    steps = run.checkpoints()
    return f"the last good checkpoint is step {steps[-1]}" if steps else "there is no checkpoint"

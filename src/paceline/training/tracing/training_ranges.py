"""Ranges for the steps, micro-batches, phases, blocks and pipeline actions of a training."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.parallel.module_hooks import find_parts
from paceline.task import Task, read_layout
from paceline.training.prepared import PreparedTraining
from paceline.training.step.step import TrainingStep, ignore_microbatch
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.tracing.block_calls import open_block_ranges
from paceline.training.tracing.ranges import ACTION, OpenRange, RangeStack, name_action


class TrainingRanges:
    """Opens ranges of a training from its making to `end`.

    openers: what opens a range, such as `open_profiler_range`; empty: nothing is observed.
    """

    def __init__(
        self, task: Task, prepared: PreparedTraining, heartbeat: HeartbeatWriter, openers: Sequence[OpenRange]
    ):
        self._stack = RangeStack(partial(_open_all, openers))
        self._ends: list[Callable[[], None]] = []
        self.is_observing = bool(openers)
        if not openers:
            return
        open_range: OpenRange = partial(_open_all, openers)
        parts = find_parts(prepared.model, read_layout(task))
        self._ends.append(open_block_ranges(parts, open_range))
        heartbeat.on_phase = self._stack.begin_phase
        self._ends.append(partial(setattr, heartbeat, "on_phase", None))
        for step in _list_steps(prepared):
            step.on_microbatch = self._stack.begin_microbatch
            self._ends.append(partial(setattr, step, "on_microbatch", ignore_microbatch))
        if (pipeline := prepared.step.pipeline) is not None:
            pipeline.actions.on_begin = lambda action: open_range(ACTION, name_action(action))
            self._ends.append(partial(setattr, pipeline.actions, "on_begin", None))

    def begin_step(self, step: int) -> None:
        if self.is_observing:
            self._stack.begin_step(step)

    def end_step(self) -> None:
        self._stack.close()

    def end(self) -> None:
        """Close all ranges, and stop observing."""
        self._stack.close()
        while self._ends:
            self._ends.pop()()


def open_nvtx_range(kind: str, name: str) -> Callable[[], None]:
    """Open an NVTX range, which Nsight Systems shows, and return what closes it."""
    torch.cuda.nvtx.range_push(name)
    return _pop_nvtx_range


def _pop_nvtx_range() -> None:
    torch.cuda.nvtx.range_pop()


def _open_all(openers: Sequence[OpenRange], kind: str, name: str) -> Callable[[], None]:
    closes = [open_range(kind, name) for open_range in openers]

    def close() -> None:
        for close_one in reversed(closes):
            close_one()

    return close


def _list_steps(prepared: PreparedTraining) -> list[TrainingStep]:
    update = prepared.update
    return update.steps if isinstance(update, UpdateSequence) else [prepared.step]

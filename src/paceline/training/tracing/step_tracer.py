"""Trace the steps that the request names, on all ranks, by one clock."""

import contextlib
import gc
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.clock_offset import gather_objects, measure_clock_offset
from paceline.distributed.shared_barrier import show_waits
from paceline.distributed.unfinished import read_collectives
from paceline.distributed.world import World
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import PlanError, RunError, SpecError
from paceline.events import Noted
from paceline.files import reason
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.profiling.torch_profiler import TorchProfiler
from paceline.training.tracing.chrome_events import TraceClock, build_events
from paceline.training.tracing.collectives import find_collectives, find_known_numbers
from paceline.training.tracing.pipeline_events import make_pipeline_events
from paceline.training.tracing.profiled_ops import read_profiled_ops
from paceline.training.tracing.ranges import OpenRange, open_profiler_range
from paceline.training.tracing.trace_files import (
    ALL,
    RankEvents,
    describe_failures,
    merge_traces,
    rank_file,
    write_rank_trace,
)
from paceline.training.tracing.training_ranges import TrainingRanges, open_nvtx_range

VIEWER = "https://ui.perfetto.dev"


class StepTracer:
    """Traces the requested steps. All ranks call `begin` before and `end` after each step.

    first: steps done before the first of this start.
    """

    def __init__(
        self,
        context: RankContext,
        prepared: PreparedTraining,
        heartbeat: HeartbeatWriter,
        first: int,
    ):
        self.context, self.prepared, self.heartbeat = context, prepared, heartbeat
        steps = context.spec.trace_steps
        self.steps = range(max(steps.start, first + 1), steps.stop) if context.run is not None else range(0)
        self._open: _OpenTrace | None = None
        self._openers = [open_nvtx_range] if uses_nvtx(context.spec, context.device) else []
        self._ranges = self._observe(self._openers)

    def _observe(self, openers: Sequence[OpenRange]) -> TrainingRanges:
        return TrainingRanges(self.context.task, self.prepared, self.heartbeat, openers)

    def begin(self, step: int) -> None:
        """Begin a step, after `step` steps. The first traced step is a collective."""
        if self._open is None and self.steps and step + 1 == self.steps[0]:
            self._open = _OpenTrace(self.context)
            if self._open.profiler.is_running:
                self._ranges.end()
                self._ranges = self._observe([*self._openers, open_profiler_range])
        self._ranges.begin_step(step + 1)

    def end(self, step: int) -> Iterator[Noted]:
        """End a step, the `step`-th. The last traced step is a collective."""
        self._ranges.end_step()
        if self._open is not None and step == self.steps[-1]:
            yield from self.finish(step)

    def finish(self, step: int) -> Iterator[Noted]:
        """Write the trace, if one is open, up to the `step`-th step, and yield where it is. A collective."""
        if self._open is not None:
            trace, self._open = self._open, None
            self._ranges.end()
            yield Noted(step=step, message=trace.finish(self.steps[0], step))
            self._ranges = self._observe(self._openers)

    def close(self) -> None:
        """Stop observing, and stop a trace that is not complete when the training fails."""
        self._ranges.end()
        if self._open is not None:
            self._open.stop()
            self._open = None


def uses_nvtx(spec: Spec, device: torch.device) -> bool:
    """Return whether the training opens NVTX ranges."""
    return spec.nvtx and device.type == "cuda"


def check_traced_steps(spec: Spec, plan: ResolvedPlan, total: int) -> None:
    """Raise an Error if the steps to trace cannot be traced. total: steps of the training."""
    if not spec.trace_steps:
        return
    if plan.servers is not None:
        raise PlanError(
            f"plan {plan}: parameter servers and workers have no common steps; leave trace={spec.trace} out"
        )
    if spec.trace_steps[-1] > total:
        raise SpecError(
            f"trace={spec.trace} has steps up to {spec.trace_steps[-1]}, and the training ends at step "
            f"{total}; use steps from 1 to {total}"
        )


class _OpenTrace:
    """A trace that is being recorded. Making it and `finish` are collectives."""

    def __init__(self, context: RankContext):
        self.context = context
        offset = measure_clock_offset(context.world)
        self.clock = TraceClock(_read_first_clock(context.world), offset.offset_ns, offset.error_ns)
        self.profiler = TorchProfiler(context.device, profile_memory=False)
        show_waits(self.profiler.is_running)

    def stop(self) -> bool:
        """Stop recording, and return whether that was possible."""
        show_waits(False)
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return self.profiler.stop()

    def finish(self, first: int, last: int) -> str:
        """Write the trace of the steps from `first` to `last`, and return a sentence about it."""
        world, run = self.context.world, self.context.run
        assert run is not None
        folder = run.traces / f"steps_{first}-{last}"
        failures: list[str | None] = gather_objects(self._stop_for_files(), world.size)
        written: list[RankEvents | str] = []
        if not any(failures):
            with _without_collections():
                result = self._write(first, last)
            written = gather_objects(result, world.size)
            failures = [result if isinstance(result, str) else None for result in written]
        why = describe_failures(failures)
        if not why and world.rank == 0:
            try:
                ranks = [result for result in written if not isinstance(result, str)]
                why = merge_traces(folder, ranks, self._facts(first, last))
            except RunError as error:
                why = str(error)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        if not why:
            return f"traced {steps}: {folder / ALL}; open it in {VIEWER}"
        whole = f"; {folder} has the traces of the ranks" if not any(failures) else ""
        return f"the trace of {steps} is not complete: {why}{whole}"

    def _stop_for_files(self) -> str | None:
        """Stop recording, and return why no trace can be written, or None."""
        if not self.profiler.is_running:
            return "another profiler of torch is active; leave either of them out"
        return None if self.stop() else "a collective of these steps did not end"

    def _write(self, first: int, last: int) -> RankEvents | str:
        """Write the trace of this rank, and return what it has, or why that is not possible. A collective."""
        context = self.context
        assert context.run is not None
        rank, recorded = context.world.rank, read_collectives()
        ops = read_profiled_ops(self.profiler.results.events(), context.device.type == "cuda")
        collectives = find_collectives(ops, recorded, _list_groups())
        known = gather_objects(find_known_numbers(collectives), context.world.size)
        events = chain(
            build_events(ops, collectives, known, rank, _describe_rank(context), self.clock),
            make_pipeline_events(ops, context.plan, rank, self.clock),
        )
        folder = context.run.traces / f"steps_{first}-{last}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write_rank_trace(
                folder / rank_file(rank),
                events,
                self._facts(first, last) | {"rank": rank, "clock_error_us": self.clock.error_ns / 1000},
            )
        except (OSError, RunError) as error:
            return reason(error)

    def _facts(self, first: int, last: int) -> dict[str, Any]:
        context = self.context
        return {
            "run": str(context.run.path) if context.run is not None else "",
            "plan": str(context.plan),
            "ranks": context.world.size,
            "first_step": first,
            "last_step": last,
        }


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: torch has so many objects that a collection takes longer than a trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_first_clock(world: World) -> int:
    """Return the time of rank 0. A collective."""
    now = [time.time_ns()]
    if world.size > 1:
        dist.broadcast_object_list(now, 0)
    return now[0]


def _list_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name."""
    if not dist.is_initialized():
        return {}
    members = dist.distributed_c10d._world.pg_group_ranks
    return {
        group.group_name: sorted(ranks)
        for group, ranks in members.items()
        if isinstance(group, dist.ProcessGroup)  # a group of other ranks is a number
    }


def _describe_rank(context: RankContext) -> str:
    """Return the rank with its coordinates on the axes that the plan uses, and its node."""
    plan, rank = context.plan, context.world.rank
    degrees = {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
    place = asdict(plan.place(rank))
    axes = [f"{axis}={place[axis]}" for axis, degree in degrees.items() if degree > 1]
    return " ".join([f"rank {rank}", *axes, f"on {platform.node()}"])

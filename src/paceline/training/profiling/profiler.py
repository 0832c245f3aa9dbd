"""Where the time and memory of a training go: a few of its steps are profiled, on all ranks alike, as often as 1 % of its time allows."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.world import World
from paceline.events import Profiled
from paceline.plan.cost_model.compare import MOST_STEPS
from paceline.plan.plan import ResolvedPlan
from paceline.training.profiling import peak_memory
from paceline.training.profiling.time_breakdown import (
    END,
    GRADIENTS,
    STEP,
    UPDATED,
    Op,
    StepSeconds,
    marked,
    on_device,
    on_host,
)
from paceline.training.setup import PreparedTraining

SHARE = 0.01  # of the training that it may take
WARM_UP_STEPS = 3  # before the first profiled one
AGAIN = 8  # times in a training that is long enough, and more often at its beginning
START_S = {"cpu": 0.03, "cuda": 4.0}  # of a first profile, before it is known; on CUDA its library is started
VARIES = 1.5  # times as much as any before may the next one cost
EVENT_S = 2e-6  # that writing down each event takes from a step
PARTS = (
    "compute",
    "communication",
    "bubble",
    "input",
    "optimizer",
    "other",
)  # of a step; a save is none of a step


class StepProfiler:
    """Call `begin` before and `end` after each step; all ranks must do so in step."""

    def __init__(
        self,
        wanted: bool | None,
        first: int,
        total: int,
        laid: PreparedTraining,
        plan: ResolvedPlan,
        world: World,
        device: torch.device,
    ):
        self.wanted = wanted if laid.servers is None else False
        self.first, self.total, self.laid, self.plan, self.world, self.device = (
            first,
            total,
            laid,
            plan,
            world,
            device,
        )
        self.told_s = 0.0
        self.told_steps = -1
        self.next = first + WARM_UP_STEPS  # steps done before the next profile
        self.spent_s = 0.0
        self.costs_s: float | None = None  # the dearest profile so far
        self.open: _Profile | None = None

    def begin(self, step: int) -> None:
        """`step` steps are done."""
        if self.open is None and self._is_due(step):
            self.open = _Profile(self.laid, self.device, self._steps(step), step)
        if self.open is not None:
            self.open.begin()

    def end(self, step: int, data_s: float) -> Iterator[Profiled]:
        """`step` steps are done; the last one waited so long for its batch."""
        if self.open is None or not self.open.is_done(step, data_s):
            return
        profile, self.open = self.open, None
        rows = _gathered(profile.read(), self.world, self.device)
        costs_s = max(row[0] for row in rows)
        self.costs_s = max(costs_s, self.costs_s or 0.0)
        self.spent_s += costs_s
        self.next = step + min(step - self.first, max(1, (self.total - self.first) // AGAIN))
        if all(row[1] for row in rows):
            yield _profiled(rows, self.plan, step, profile.steps)

    def tell(self, step_s: float, steps: int) -> None:
        """So many took so long, the mean over the ranks. The first ones are slow, and do not count."""
        self.told_s += step_s * steps if self.told_steps >= 0 else 0.0
        self.told_steps += steps if self.told_steps >= 0 else 1

    def close(self) -> None:
        """Where the training ends in the midst of a profile."""
        if self.open is not None:
            self.open.stop()
            self.open = None

    def _steps(self, step: int) -> int:
        """Where weights are averaged now and then, one round."""
        local = self.laid.local
        return local.period if local is not None and step >= local.switch else 1

    def _is_due(self, step: int) -> bool:
        steps = self._steps(step)
        if self.wanted is False or step < self.next or step + steps > self.total or steps > MOST_STEPS:
            return False
        if self.costs_s is None and self.wanted:
            return True
        if self.told_steps <= 0:
            return False
        step_s = self.told_s / self.told_steps
        costs_s = (
            VARIES * self.costs_s if self.costs_s is not None else START_S[self.device.type] + steps * step_s
        )
        return self.spent_s + costs_s <= SHARE * step_s * (self.total - self.first)


class _Profile:
    """A few steps under torch's profiler."""

    def __init__(self, laid: PreparedTraining, device: torch.device, steps: int, first: int):
        self.laid, self.device, self.steps, self.first = laid, device, steps, first
        began = time.perf_counter()
        self.data_ns: list[int] = []
        self.grads: peak_memory.Storages = {}
        self.stays = peak_memory.weights(laid), peak_memory.optimizer_state(laid)
        self.observe, laid.step.observe = laid.step.observe, self._observe
        self.profiler: Any = None
        if not torch.autograd._profiler_enabled():  # by the user, whose own it is
            os.environ.setdefault(
                "KINETO_LOG_LEVEL", "6"
            )  # else it says on standard error that it starts (torch 2.13)
            self.logs_from = _logs_from(ERROR)
            use = "cuda" if device.type == "cuda" else None
            with torch.autograd.profiler.profile(
                use_device=use
            ):  # the first operation that is profiled takes long
                torch.zeros(1, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self.profiler = torch.autograd.profiler.profile(use_device=use, profile_memory=True)
            self.profiler.__enter__()
        self.costs_s = time.perf_counter() - began

    def begin(self) -> None:
        with _mark(STEP):
            pass

    def _observe(self, what: str, step: int) -> None:
        if self.observe is not None:
            self.observe(what, step)
        with _mark(GRADIENTS if what == "gradients" else UPDATED):
            self.grads = peak_memory.gradients(self.laid) if what == "gradients" else self.grads

    def is_done(self, step: int, data_s: float) -> bool:
        self.data_ns.append(int(data_s * 1e9))
        is_last = step == self.first + self.steps
        if is_last and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with _mark(END):
            pass
        return is_last

    def stop(self) -> None:
        self.laid.step.observe = self.observe
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            _logs_from(self.logs_from)

    def read(self) -> list[float]:
        """One row of figures, of which the second is 0 where they were not to be had."""
        began = time.perf_counter()
        self.stop()
        if self.profiler is None:
            return [self.costs_s, *[0.0] * (COLUMNS - 1)]
        cuda = self.device.type == "cuda"
        results = self.profiler.kineto_results
        ops = list(_ops(results.events(), cuda))
        seconds = (on_device if cuda else on_host)(ops, self.data_ns)
        happened = peak_memory.allocations(results.experimental_event_tree(), self.device)
        steps, gradients, _, ends = marked(ops)
        held = peak_memory.held(self.stays, self.grads, happened, steps[-1], gradients[-1][0], ends[-1])
        if cuda:  # its allocator knows of what is not a tensor's, too
            most = torch.cuda.max_memory_allocated(self.device)
            held = held._replace(activations=max(0.0, most - held.total + held.activations))
        self.costs_s += time.perf_counter() - began + EVENT_S * len(ops)
        return [self.costs_s, 1.0, *seconds, *held]


ERROR = 2  # of c10's levels


def _logs_from(level: int) -> int:
    """Which level torch's own log begins with; returns the one before. Else it warns of each tensor that is older than the profile and
    freed in it (torch 2.13)."""
    with contextlib.suppress(OSError, ValueError):  # another platform, or torch
        begins = ctypes.c_int.in_dll(
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_log_level"
        )
        before, begins.value = begins.value, level
        return before
    return level


COLUMNS = 2 + len(StepSeconds._fields) + len(peak_memory.PeakMemory._fields)


_mark = torch.autograd.profiler.record_function


def _ops(events: Sequence[Any], cuda: bool) -> Iterator[Op]:
    """What the timeline wants to know of a profiler's events."""
    if not cuda:
        for event in events:
            if (name := event.name()) != "[memory]":
                begin = event.start_ns()
                yield Op(
                    name,
                    begin,
                    begin + event.duration_ns(),
                    None if event.is_async() else event.start_thread_id(),
                )
        return
    from torch.autograd import DeviceType

    on_host = [event.device_type() == DeviceType.CPU for event in events]
    launches = {
        event.correlation_id(): event.start_ns()
        for event in events
        if event.name().startswith(("cuda", "cuLaunch"))
    }
    asked = {
        event.name() for event, here in zip(events, on_host, strict=True) if here
    }  # annotations, which a device has too
    for event, here in zip(events, on_host, strict=True):
        name, begin, end = event.name(), event.start_ns(), event.start_ns() + event.duration_ns()
        if here and name != "[memory]":
            yield Op(name, begin, end, event.start_thread_id())
        elif not here and name not in asked:
            yield Op(name, begin, end, None, launches.get(event.correlation_id(), begin))


def _gathered(row: list[float], world: World, device: torch.device) -> list[list[float]]:
    """That of each rank. A collective."""
    table = torch.zeros(world.size, len(row), dtype=torch.float64, device=device)
    table[world.rank] = torch.tensor(row, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(table)
    found: list[list[float]] = table.tolist()
    return found


def _profiled(rows: list[list[float]], plan: ResolvedPlan, step: int, num_steps: int) -> Profiled:
    """Of what the ranks saw, by rank."""
    count = len(StepSeconds._fields)
    seconds = [StepSeconds(*row[2 : 2 + count]) for row in rows]
    held = [peak_memory.PeakMemory(*row[2 + count :]) for row in rows]
    split = [_parts(one, plan, min(other.transfer for other in seconds)) for one in seconds]
    busy = [one["compute"] + one["input"] + one["optimizer"] + one["other"] for one in split]
    stages = [[rank for rank in range(len(rows)) if plan.place(rank).pp == pp] for pp in range(plan.pp)]
    stage = max(stages, key=lambda ranks: sum(busy[rank] for rank in ranks) / len(ranks))
    slowest = busy.index(max(busy))
    fullest = max(range(len(rows)), key=lambda rank: held[rank].total)
    return Profiled(
        step=step,
        num_steps=num_steps,
        step_s=_average([seconds[rank].step for rank in stage]),
        seconds={name: _average([split[rank][name] for rank in stage]) for name in PARTS},
        input_s=split[0]["input"],
        slowest=slowest,
        slowest_s=busy[slowest],
        busy_s=_average(busy),
        fullest=fullest,
        memory={name: round(value) for name, value in held[fullest]._asdict().items()},
        costs_s=max(row[0] for row in rows),
    )


def _parts(one: StepSeconds, plan: ResolvedPlan, transfer: float) -> dict[str, float]:
    """In a pipeline, waiting for a neighbour is the bubble, but for what the transfer itself takes."""
    sent = min(one.neighbours, one.waits * transfer) if plan.pp > 1 and one.waits else one.neighbours
    bubble = one.neighbours - sent
    values = (one.compute, one.communication + sent, bubble, one.input, one.optimizer, one.other)
    return dict(zip(PARTS, values, strict=True))


def _average(values: list[float]) -> float:
    return sum(values) / len(values)

"""A profile of a few steps on one rank, and the event that the profiles of all ranks give."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.world import World
from paceline.events import Profiled
from paceline.plan.plan import ResolvedPlan
from paceline.training.profiling import peak_memory
from paceline.training.profiling.peak_memory import PeakMemory, ProfiledState
from paceline.training.profiling.time_breakdown import (
    END,
    GRADIENTS,
    STEP,
    UPDATED,
    Op,
    StepSeconds,
    find_marks,
    measure_on_device,
    measure_on_host,
)
from paceline.training.profiling.torch_profiler import TorchProfiler

EVENT_S = 2e-6  # that recording an event adds to a step
# Of a step; a checkpoint is not part of a step.
PARTS = ("compute", "communication", "bubble", "input", "optimizer", "other")

# Called with "gradients" before an update, and with "weights" after it, and with the number of the step.
Observer = Callable[[str, int], None]


class Profile:
    """A few steps under torch's profiler.

    set_observer: sets what the training calls before and after an update, and returns what it called before.
    first: number of the step before the first of `steps`.
    may_differ: whether the steps run different updates.
    """

    def __init__(
        self,
        state: ProfiledState,
        set_observer: Callable[[Observer | None], Observer | None],
        device: torch.device,
        steps: int,
        first: int,
        may_differ: bool,
    ):
        self.state, self.set_observer, self.device = state, set_observer, device
        self.steps, self.first, self.may_differ = steps, first, may_differ
        began = time.perf_counter()
        self.data_ns: list[int] = []
        self.grads: list[peak_memory.StorageBytes] = []  # of each pass
        self.constant_bytes = (
            peak_memory.count_weight_bytes(state),
            peak_memory.count_optimizer_bytes(state),
        )
        self.observe = set_observer(self._observe)
        self.profiler = TorchProfiler(device, profile_memory=True)
        self.cost_s = time.perf_counter() - began

    def begin(self) -> None:
        with _mark(STEP):
            pass

    def _observe(self, what: str, step: int) -> None:
        if self.observe is not None:
            self.observe(what, step)
        with _mark(GRADIENTS if what == "gradients" else UPDATED):
            if what == "gradients":
                self.grads.append(
                    peak_memory.find_storages(
                        param.grad for param in self.state.params if param.grad is not None
                    )
                )

    def is_done(self, step: int, data_s: float) -> bool:
        """End a step, and return whether it is the last of the profile."""
        self.data_ns.append(int(data_s * 1e9))
        is_last = step == self.first + self.steps
        if is_last and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with _mark(END):
            pass
        return is_last

    def stop(self) -> bool:
        """Stop torch's profiler, and return whether that was possible."""
        self.set_observer(self.observe)
        return self.profiler.stop()

    def read(self) -> list[float]:
        """Return a row of NUM_COLUMNS figures.

        These are the cost in seconds, 1 if the others are measured and 0 if not, StepSeconds, PeakMemory.
        """
        began = time.perf_counter()
        if not self.stop():
            return [self.cost_s, *[0.0] * (NUM_COLUMNS - 1)]
        cuda = self.device.type == "cuda"
        results = self.profiler.results
        ops = list(_convert_events(results.events(), cuda))
        seconds = (measure_on_device if cuda else measure_on_host)(ops, self.data_ns)
        allocations = peak_memory.find_allocations(results.experimental_event_tree(), self.device)
        peak = self._find_peak(ops, allocations)
        if cuda:  # its allocator also counts memory outside of tensors
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            peak = peak._replace(activations=max(0.0, peak_bytes - peak.total + peak.activations))
        self.cost_s += time.perf_counter() - began + EVENT_S * len(ops)
        return [self.cost_s, 1.0, *seconds, *peak]

    def _find_peak(self, ops: Sequence[Op], allocations: Sequence[peak_memory.Allocation]) -> PeakMemory:
        """Return the memory at the peak of the last step, or of all steps if they run different updates."""
        steps, gradients, updated, ends = find_marks(ops)
        created = {allocation.address for allocation in allocations if allocation.bytes > 0}
        buckets = {
            address: size for grads in self.grads for address, size in grads.items() if address not in created
        }
        peaks = []
        for begin, end in [*zip(steps, ends, strict=True)][0 if self.may_differ else -1 :]:
            of_step = [at for at, (marked, _) in enumerate(gradients) if begin <= marked < end]
            for at in of_step:
                until = end if at == of_step[-1] else updated[at]
                grads = buckets | self.grads[at]
                peaks.append(
                    peak_memory.measure_peak(
                        self.constant_bytes, grads, allocations, begin, gradients[at][0], until
                    )
                )
                begin = until
        return max(peaks, key=lambda peak: peak.total)


NUM_COLUMNS = 2 + len(StepSeconds._fields) + len(PeakMemory._fields)


_mark = torch.autograd.profiler.record_function


def _convert_events(events: Sequence[Any], cuda: bool) -> Iterator[Op]:
    """Yield the events of a profiler that the time breakdown needs."""
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
    # Annotations of the host, which the device repeats.
    host_names = {event.name() for event, is_host in zip(events, on_host, strict=True) if is_host}
    for event, is_host in zip(events, on_host, strict=True):
        name, begin, end = event.name(), event.start_ns(), event.start_ns() + event.duration_ns()
        if is_host and name != "[memory]":
            yield Op(name, begin, end, event.start_thread_id())
        elif not is_host and name not in host_names:
            yield Op(name, begin, end, None, launches.get(event.correlation_id(), begin))


def gather_rows(row: list[float], world: World, device: torch.device) -> list[list[float]]:
    """Return the row of each rank. A collective call."""
    table = torch.zeros(world.size, len(row), dtype=torch.float64, device=device)
    table[world.rank] = torch.tensor(row, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(table)
    rows: list[list[float]] = table.tolist()
    return rows


def make_profiled_event(rows: list[list[float]], plan: ResolvedPlan, step: int, num_steps: int) -> Profiled:
    """Return the event of a profile, given the row of each rank."""
    count = len(StepSeconds._fields)
    seconds = [StepSeconds(*row[2 : 2 + count]) for row in rows]
    peaks = [PeakMemory(*row[2 + count :]) for row in rows]
    parts = [_split_bubble(rank, plan, min(other.transfer for other in seconds)) for rank in seconds]
    busy = [rank["compute"] + rank["input"] + rank["optimizer"] + rank["other"] for rank in parts]
    stages = [[rank for rank in range(len(rows)) if plan.place(rank).pp == pp] for pp in range(plan.pp)]
    stage = max(stages, key=lambda ranks: sum(busy[rank] for rank in ranks) / len(ranks))
    slowest = busy.index(max(busy))
    fullest = max(range(len(rows)), key=lambda rank: peaks[rank].total)
    return Profiled(
        step=step,
        num_steps=num_steps,
        step_s=_average([seconds[rank].step for rank in stage]),
        seconds={name: _average([parts[rank][name] for rank in stage]) for name in PARTS},
        input_s=parts[0]["input"],
        slowest=slowest,
        slowest_s=busy[slowest],
        busy_s=_average(busy),
        fullest=fullest,
        memory={name: round(value) for name, value in peaks[fullest]._asdict().items()},
        costs_s=max(row[0] for row in rows),
    )


def _split_bubble(rank: StepSeconds, plan: ResolvedPlan, transfer: float) -> dict[str, float]:
    """Return the PARTS of a rank.

    In a pipeline, waiting for a neighbour is the bubble, except the transfer itself.
    """
    sent = min(rank.neighbours, rank.waits * transfer) if plan.pp > 1 and rank.waits else rank.neighbours
    bubble = rank.neighbours - sent
    values = (rank.compute, rank.communication + sent, bubble, rank.input, rank.optimizer, rank.other)
    return dict(zip(PARTS, values, strict=True))


def _average(values: list[float]) -> float:
    return sum(values) / len(values)

"""Rules about GPUs, from samples: idle, starved, throttled, full, shared.

They need no run, so that they also apply to recordings of nvidia-smi.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import NOT_APPLICABLE, Evidence, Missing, NotApplicable, Outcome
from paceline.inspect.growth import GrowthLimits, find_growth
from paceline.inspect.windows import Window
from paceline.monitor.columns import throttle_reasons
from paceline.units import format_bytes, format_seconds

MiB = 2**20
MIN_SAMPLES, MIN_SAMPLED_S = 10, 10.0
MAX_NAMED = 4  # GPUs
IDLE_PERCENT = 5.0  # of a sample: a display or a monitor uses up to a few percent
IDLE_SHARE = 0.9  # of the samples, for a GPU that is not used at all
STARVED_PERCENT = 50.0  # mean utilization below which a GPU waits most of the time
WASTED_PERCENT = 70.0  # mean utilization below which a larger batch may help
FULL_SHARE = 0.97  # of the memory of a GPU
SMALL_SHARE = 0.35
GROWTH = GrowthLimits(MiB=1024.0, share=0.15, late=0.5, falling=1)  # of the memory of a GPU
SLOW_REASONS = {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"}
THROTTLED_SHARE = 0.1  # of the samples
LOW_CLOCK = 0.7  # of the highest clock; under a power limit, full load runs at 80 to 95 %
FALLEN_CLOCK = 0.6  # of the clock at the beginning, if the reasons are unknown
BUSY_PERCENT = 50.0  # utilization from which a clock says something
SHARED_SHARE = 0.2  # of the samples in which another process computes
TENSOR_PERCENT, ACTIVE_PERCENT = 1.0, 30.0


class Gpu(NamedTuple):
    """The samples of a GPU in the part of a recording in which any GPU of the node worked."""

    window: Window
    number: int

    @property
    def name(self) -> str:
        node = f" of {self.window.node}" if self.window.is_one_of_several else ""
        return f"GPU {self.number}{node}"

    def values(self, what: str) -> list[float]:
        return self.window.values(f"gpu{self.number} {what}")


def _each_gpu(facts: RunFacts, find: Callable[[Gpu], Evidence | None], *needed: str) -> Outcome:
    """Return what a function finds for each GPU with enough samples of all needed columns."""
    gpus = [Gpu(window, number) for window in facts.windows for number in window.gpus]
    if not gpus:
        if facts.started is not None and facts.is_cpu:
            return NOT_APPLICABLE
        return Missing("no samples of a GPU" + facts.why_no_samples)
    sampled = [gpu for gpu in gpus if all(len(gpu.values(what)) >= MIN_SAMPLES for what in needed)]
    sampled = [gpu for gpu in sampled if gpu.window.duration_s >= MIN_SAMPLED_S]
    if not sampled:
        return Missing(
            f"it needs {MIN_SAMPLES} samples over {MIN_SAMPLED_S:.0f} s of: gpu {', gpu '.join(needed)}"
        )
    return [evidence for gpu in sampled if (evidence := find(gpu)) is not None]


def check_idle(facts: RunFacts) -> Outcome:
    """GPUs without work: for the whole time, or most of the time."""
    if facts.is_cpu and facts.launch is not None and facts.launch.device == "cpu":
        return NOT_APPLICABLE
    outcome = _each_gpu(facts, _find_idle, "utilization")
    return outcome if isinstance(outcome, Missing | NotApplicable) else _group_idle(outcome)


def _find_idle(gpu: Gpu) -> Evidence | None:
    used = gpu.values("utilization")
    idle = sum(value <= IDLE_PERCENT for value in used) / len(used)
    mean = statistics.fmean(used)
    values = {"gpu": gpu.number, "utilization": mean, "idle_share": idle, "samples": len(used)}
    duration = format_seconds(gpu.window.duration_s)
    if idle >= IDLE_SHARE:
        num_gpus = len(gpu.window.gpus)
        time = f"the whole {duration}" if idle == 1.0 else f"{idle:.0%} of {duration}"
        fix = f"give each GPU a rank: --ranks {num_gpus}, or request fewer GPUs"
        return Evidence(f"{gpu.name} was idle ({mean:.0f} %) for {time}", values, idle / num_gpus, fix)
    if mean < STARVED_PERCENT:
        return Evidence(
            f"{gpu.name} worked for {mean:.0f} % of {duration} and waited for the rest",
            values,
            1 - mean / 100,
            "more workers read samples (--workers), a larger --batch, --compile, or fewer copies between "
            "host and GPU",
        )
    return None


def _group_idle(found: Sequence[Evidence]) -> list[Evidence]:
    """Return at most MAX_NAMED findings, the costly ones; the last says how many GPUs are like it."""
    ordered = sorted(found, key=lambda evidence: -(evidence.share or 0.0))
    if len(ordered) <= MAX_NAMED:
        return list(found)
    rest = ordered[MAX_NAMED - 1 :]
    last = rest[0]
    return [
        *ordered[: MAX_NAMED - 1],
        replace(
            last,
            sentence=f"{last.sentence}; so were {len(rest) - 1} more GPUs",
            share=min(1.0, sum(evidence.share or 0.0 for evidence in rest)),
        ),
    ]


def check_throttling(facts: RunFacts) -> Outcome:
    """GPUs that lower their clock because of heat, power or a fault."""

    def find(gpu: Gpu) -> Evidence | None:
        clocks, limit = gpu.values("clock sm"), max(gpu.values("clock sm limit"), default=math.nan)
        bits = gpu.values("throttle")
        hot = [value for value in bits if SLOW_REASONS & {*throttle_reasons(value)}]
        if bits and len(hot) >= max(MIN_SAMPLES / 2, THROTTLED_SHARE * len(bits)):
            reasons = sorted({name for value in hot for name in throttle_reasons(value)} & SLOW_REASONS)
            share = len(hot) / len(bits)
            slow = 1 - statistics.median(clocks) / limit if clocks and limit == limit else None
            return Evidence(
                f"{gpu.name} lowered its clock for {share:.0%} of the time: {', '.join(reasons)}",
                {"gpu": gpu.number, "throttled_share": share},
                share * max(0.0, slow) if slow is not None else None,
                "check cooling and power supply of the node; report it to its administrators",
            )
        return _find_low_clock(gpu, limit, has_reasons=bool(bits))

    outcome = _each_gpu(facts, find, "throttle")
    return outcome if not isinstance(outcome, Missing) else _each_gpu(facts, find, "clock sm", "utilization")


def _find_low_clock(gpu: Gpu, limit: float, has_reasons: bool) -> Evidence | None:
    """Return a finding if the clock under load is far below its limit, that of the other GPUs, or fell."""
    clocks = _read_busy_clocks(gpu)
    if len(clocks) < MIN_SAMPLES:
        return None
    clock = statistics.median(clocks)
    others = [
        _read_busy_clocks(Gpu(gpu.window, number)) for number in gpu.window.gpus if number != gpu.number
    ]
    known = [statistics.median(values) for values in others if len(values) >= MIN_SAMPLES]
    other = statistics.median(known) if known else math.nan
    third = len(clocks) // 3
    first, last = statistics.median(clocks[:third]), statistics.median(clocks[-third:])
    if 0 < clock < LOW_CLOCK * limit:
        ratio, what = clock / limit, f"ran at {clock / limit:.0%} of its highest clock under load"
    elif 0 < clock < LOW_CLOCK * other:
        ratio, what = clock / other, f"ran at {clock:.0f} MHz under load, the other GPUs at {other:.0f} MHz"
    elif not has_reasons and third >= MIN_SAMPLES and 0 < last < FALLEN_CLOCK * first:
        ratio, what = last / first, f"lowered its clock under load from {first:.0f} to {last:.0f} MHz"
    else:
        return None
    return Evidence(
        f"{gpu.name} {what}",
        {"gpu": gpu.number, "clock_share": ratio},
        1 - ratio,
        "compare its power limit, clocks and temperature: nvidia-smi -q -d POWER,CLOCK,TEMPERATURE",
    )


def _read_busy_clocks(gpu: Gpu) -> list[float]:
    pairs = gpu.window.pairs(f"gpu{gpu.number} utilization", f"gpu{gpu.number} clock sm")
    return [clock for used, clock in pairs if used >= BUSY_PERCENT]


def check_full(facts: RunFacts) -> Outcome:
    """GPUs whose memory is nearly full."""

    def find(gpu: Gpu) -> Evidence | None:
        used, total = max(gpu.values("memory used")), max(gpu.values("memory total"))
        if total <= 0 or used / total < FULL_SHARE:
            return None
        return Evidence(
            f"{used / total:.0%} of the memory of {gpu.name} was in use: a slightly larger batch fails",
            {"gpu": gpu.number, "used_MiB": used, "total_MiB": total},
            None,
            "--plan zero2 or zero3 divides weights and optimizer, recompute=selective frees activations",
        )

    return _each_gpu(facts, find, "memory used", "memory total")


def check_gpu_growth(facts: RunFacts) -> Outcome:
    """GPUs whose memory grows steadily until the end."""

    def find(gpu: Gpu) -> Evidence | None:
        growth = find_growth(gpu.number, gpu.window.timed(f"gpu{gpu.number} memory used"), GROWTH)
        if growth is None:
            return None
        total = max(gpu.values("memory total"), default=math.nan)
        left_s = (total - growth.last_MiB) / growth.MiB_per_s
        until = f"; it will be full in {format_seconds(max(0.0, left_s))}" if total == total else ""
        return Evidence(
            f"the memory of {gpu.name} grows by {format_bytes(growth.MiB_per_s * 60 * MiB)} a minute, from "
            f"{format_bytes(growth.first_MiB * MiB)} to {format_bytes(growth.last_MiB * MiB)}{until}",
            {"gpu": gpu.number, "MiB_per_s": growth.MiB_per_s, "last_MiB": growth.last_MiB},
            None,
            "look for lists that keep tensors of each step, such as losses without .item() or .detach()",
        )

    return _each_gpu(facts, find, "memory used")


def check_small(facts: RunFacts) -> Outcome:
    """GPUs with little memory in use and unused time: the batch could grow."""

    def find(gpu: Gpu) -> Evidence | None:
        used, total = max(gpu.values("memory used")), max(gpu.values("memory total"))
        mean = statistics.fmean(gpu.values("utilization"))
        if total <= 0 or used / total > SMALL_SHARE or not STARVED_PERCENT <= mean < WASTED_PERCENT:
            return None
        return Evidence(
            f"{gpu.name} worked for {mean:.0f} % of the time with {used / total:.0%} of its memory in use: a "
            "larger batch would fit and use it better",
            {"gpu": gpu.number, "utilization": mean, "memory_share": used / total},
            1 - mean / 100,
            "--batch with twice the samples, and a learning rate that fits it",
        )

    return _each_gpu(facts, find, "memory used", "memory total", "utilization")


def check_shared(facts: RunFacts) -> Outcome:
    """GPUs on which processes of another job compute."""

    def find(gpu: Gpu) -> Evidence | None:
        others = gpu.values("other processes")
        shared = [value for value in others if value > 0]
        share = len(shared) / len(others)
        if share < SHARED_SHARE or len(shared) < MIN_SAMPLES / 2:
            return None
        count = statistics.median(shared)
        return Evidence(
            f"another job computed on {gpu.name} for {share:.0%} of the time ({count:.0f} processes)",
            {"gpu": gpu.number, "shared_share": share, "processes": count},
            None,
            "find its processes with nvidia-smi, or choose another GPU: CUDA_VISIBLE_DEVICES",
        )

    return _each_gpu(facts, find, "other processes")


def check_tensor_cores(facts: RunFacts) -> Outcome:
    """GPUs that compute without their Tensor Cores."""

    def find(gpu: Gpu) -> Evidence | None:
        tensor, active = gpu.values("tensor active"), gpu.values("sm active")
        if statistics.fmean(tensor) > TENSOR_PERCENT or statistics.fmean(active) < ACTIVE_PERCENT:
            return None
        return Evidence(
            f"{gpu.name} computed for {statistics.fmean(active):.0f} % of the time, and its Tensor Cores for "
            f"{statistics.fmean(tensor):.1f} %",
            {
                "gpu": gpu.number,
                "tensor_active": statistics.fmean(tensor),
                "sm_active": statistics.fmean(active),
            },
            None,
            "--precision bf16, or --tf32",
        )

    return _each_gpu(facts, find, "tensor active", "sm active")


def check_memory_errors(facts: RunFacts) -> Outcome:
    """GPUs whose memory had errors that could not be corrected."""

    def find(gpu: Gpu) -> Evidence | None:
        errors = gpu.values("ecc uncorrected")
        count = max(errors) - errors[0]
        if count <= 0:
            return None
        return Evidence(
            f"the memory of {gpu.name} had {count:.0f} errors that could not be corrected",
            {"gpu": gpu.number, "errors": count},
            None,
            "results may be wrong; do not use this GPU, and report it to the administrators of the node",
        )

    return _each_gpu(facts, find, "ecc uncorrected")

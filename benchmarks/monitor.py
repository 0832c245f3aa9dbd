"""Cost of the sampler of a node: its processor time, and what it slows the steps of two ranks by.

    python benchmarks/monitor.py [--pairs 60] [--block-s 1] [--seconds 60]

Processor time: the sampler at 1 Hz with two ranks, without GPUs and with eight simulated ones (recorded
answers of NVML: the time inside NVIDIA's driver does not count).

Slowdown: two ranks train the digits task. The sampler runs in some blocks of steps and is stopped (SIGSTOP)
in others. A pair is two blocks of each kind in the order ABBA, or BAAB in the next pair, so that a machine
that becomes slower or faster at a constant rate has no influence. The slowdown of a pair is the ratio of its
mean step times; the bound is that of the median over all pairs, by order statistics. A pair is measured
again if other programs used more than a tenth of the machine.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

import machine
import monitor  # under the name by which the ranks import it
from paceline.launch.rank_pool import Ranks
from paceline.monitor.processes import process_birth
from paceline.monitor.sampler_process import SamplerProcess
from paceline.monitor.samples import read_samples

SIMULATED = Path(__file__).parents[1] / "tests/support/simulated_nvml"
START_S = 3.0  # until the sampler takes its first samples
BATCH = 64
MAX_ATTEMPTS = 1.5  # for a pair, on average, if other programs disturb


def announce_rank(folder: str, rank: int) -> int:
    """Write a heartbeat of this process, by which the sampler finds it. Return its process id."""
    beat = {"rank": rank, "pid": os.getpid(), "host": platform.node(), "birth": process_birth(os.getpid())}
    (Path(folder) / "ranks" / f"{rank}.alive").write_text(json.dumps(beat))
    return os.getpid()


def announce_own_rank(folder: str) -> int:
    import torch.distributed as dist

    return monitor.announce_rank(folder, dist.get_rank())


@contextlib.contextmanager
def sampled(folder: Path, **environ: str) -> Iterator[SamplerProcess]:
    """Run a sampler at 1 Hz for two ranks."""
    before = dict(os.environ)
    os.environ.update(environ)
    sampler = SamplerProcess(folder, 1.0, 0, 2, 2)
    os.environ.clear()
    os.environ.update(before)
    try:
        time.sleep(START_S)
        yield sampler
    finally:
        notes = sampler.new_notes()
        sampler.stop()
    if notes:
        sys.exit("\n".join(notes))


def measure_share(sampler: SamplerProcess, seconds: float) -> tuple[float, float]:
    """Return the processor seconds until now, and the share of a core over the next `seconds`."""
    assert sampler.pid is not None
    process = psutil.Process(sampler.pid)
    begin, before = time.perf_counter(), sum(process.cpu_times()[:2])
    time.sleep(seconds)
    after = sum(process.cpu_times()[:2])
    return before, (after - before) / (time.perf_counter() - begin)


class PairTimes(NamedTuple):
    """The mean step times of the blocks with the sampler and of those without."""

    with_sampler_s: float
    without_s: float
    is_disturbed: bool  # by other programs


def time_pairs(sampler: int, own_processes: Sequence[int], pairs: int, block_s: float) -> list[PairTimes]:
    """Return the times of so many undisturbed pairs, and of the disturbed ones. Runs on each rank.

    own_processes: of the benchmark, which do not disturb. Ends after MAX_ATTEMPTS × `pairs`.
    """
    import torch
    import torch.distributed as dist

    import turns
    from paceline import Spec
    from paceline.distributed.world import World
    from paceline.plan.plan import Plan
    from paceline.task import load_task
    from paceline.training.setup import build_training
    from paceline.training.step.ddp_warmup import warm_up_ddp

    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    task = load_task("digits", {})
    prepared = build_training(Spec(batch=BATCH), Plan().resolve(size), world, task, torch.device("cpu"))
    samples = task.dataset("train")
    own = range(rank * BATCH // size, (rank + 1) * BATCH // size)
    batch = [torch.stack([torch.as_tensor(samples[index][part]) for index in own]) for part in (0, 1)]
    prepared.step.model = warm_up_ddp(prepared.step, batch)

    def step() -> None:
        prepared.step([batch], 1, 0.0)  # at a loss near 0, denormal numbers would slow the steps

    turns.time_block(step, 20)
    counts: list[int | None] = [max(1, math.ceil(block_s / turns.time_block(step, 50)))]
    dist.broadcast_object_list(counts, src=0)
    count = counts[0]
    assert count is not None
    found: list[PairTimes] = []
    while sum(not pair.is_disturbed for pair in found) < pairs and len(found) < MAX_ATTEMPTS * pairs:
        times_s: dict[bool, list[float]] = {True: [], False: []}
        first = bool(len(found) % 2)
        load, before_s = machine.LoadMeter(), read_cpu_s(own_processes)
        for runs in (first, not first, not first, first):
            if rank == 0:
                os.kill(sampler, signal.SIGCONT if runs else signal.SIGSTOP)
            times_s[runs].append(turns.time_block(step, count))
        other_share = torch.tensor(load.other_share(read_cpu_s(own_processes) - before_s))
        dist.broadcast(other_share, src=0)
        is_disturbed = other_share.item() >= machine.MAX_OTHER_SHARE
        found.append(PairTimes(statistics.mean(times_s[True]), statistics.mean(times_s[False]), is_disturbed))
    if rank == 0:
        os.kill(sampler, signal.SIGCONT)
    return found


def read_cpu_s(processes: Sequence[int]) -> float:
    """Return the processor seconds of these processes until now."""
    return sum(sum(psutil.Process(process).cpu_times()[:2]) for process in processes)


def bound_of_median(values: list[float], confidence: float = 0.95) -> float:
    """Return an upper bound of the median, from the order of the values alone."""
    count, total = len(values), 0.0
    for rank, value in enumerate(sorted(values)):
        total += math.comb(count, rank) / 2**count
        if total >= confidence:
            return value
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--block-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(machine.description(), flush=True)
    with Ranks(2) as ranks, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ranks").mkdir()
        processes = ranks(monitor.announce_own_rank, name, timeout_s=120)
        for what, environ in (
            ("2 ranks", {}),
            ("2 ranks and 8 simulated GPUs", {"PYTHONPATH": str(SIMULATED)}),
        ):
            with sampled(folder, **environ) as sampler:
                start_s, share = measure_share(sampler, options.seconds)
            print(
                f"sampler at 1 Hz, {what}: {share:.2%} of a core, after {start_s:.2f} s to start", flush=True
            )
        [path] = (folder / "monitor").iterdir()
        samples = read_samples(path)
        if samples.numbers("rank") != [0, 1] or samples.numbers("gpu") != list(range(8)):
            sys.exit(f"ranks or GPUs were not sampled: {samples.comments} {samples.absent}")
        with sampled(folder) as sampler:
            arguments = sampler.pid, [sampler.pid, *processes], options.pairs, options.block_s
            found = ranks(monitor.time_pairs, *arguments, timeout_s=3600)[0]
    print_slowdown(found, options.block_s)


def print_slowdown(found: Sequence[PairTimes], block_s: float) -> None:
    """Print the slowdown by the sampler, of the undisturbed pairs if there are at least two."""
    undisturbed = [pair for pair in found if not pair.is_disturbed]
    pairs = undisturbed if len(undisturbed) >= 2 else found
    slowdowns = [pair.with_sampler_s / pair.without_s - 1 for pair in pairs]
    low, median, high = statistics.quantiles(slowdowns, n=4)
    step_s = statistics.median(pair.without_s for pair in pairs)
    print(
        f"2 ranks, ddp, {1e3 * step_s:.2f} ms per step, {len(pairs)} pairs of 2 × 2 blocks of {block_s:g} s:"
        f" median slowdown {median:+.2%} ({low:+.2%} to {high:+.2%}),"
        f" 95 % bound of the median {bound_of_median(slowdowns):+.2%};"
        f" other programs disturbed {len(found) - len(undisturbed)} of {len(found)} pairs"
    )


if __name__ == "__main__":
    main()

"""Overhead of heartbeats and of the flight recorder: a training with and without them, in turns.

python benchmarks/heartbeat.py [--steps 300] [--times 7]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import heartbeat  # under the name by which the ranks import it
from paceline import Spec
from paceline.cluster.cpu import read_cpu
from paceline.distributed.process_group import FLIGHT_RECORDER_SIZE
from paceline.doctor import heartbeat as beat
from paceline.doctor import heartbeat_writer
from paceline.events import Step
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Save

WARMUP_STEPS = 20
NUM_HEARTBEATS = 2000


@contextlib.contextmanager
def without_heartbeats() -> Iterator[None]:
    """Disable phases and heartbeat files."""
    nothing: Any = lambda *_: None  # noqa: E731
    with (
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "enter", nothing),
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "done", nothing),
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "__enter__", lambda self: self),
    ):
        yield


def measure_step_s(folder: str, steps: int, heartbeats: bool) -> float:
    """Return the mean step time of a training of the digits task."""
    from paceline.training.train import train

    spec = Spec(
        task="digits", steps=steps, save=Save(minutes=float("inf")), evaluate_every=10**6, profile=False
    )
    with contextlib.nullcontext() if heartbeats else without_heartbeats():
        run = RunFolder(Path(folder))
        times_s = [event.step_s for event in train(spec, parse("ddp"), run=run) if isinstance(event, Step)]
    return statistics.mean(times_s[WARMUP_STEPS:])


CALLS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, times_s = torch.ones(31), []
for _ in range(20):
    start = time.perf_counter()
    for _ in range(300):
        dist.all_reduce(x)
    times_s.append((time.perf_counter() - start) / 300)
print(min(times_s))
"""


def measure_call_s(buffer_size: int) -> float:
    """Return the minimum time of a collective on one rank, with this buffer size of the flight recorder."""
    environ = os.environ | {"TORCH_FR_BUFFER_SIZE": str(buffer_size), "OMP_NUM_THREADS": "1"}
    return float(
        subprocess.run(
            [sys.executable, "-c", CALLS], env=environ, capture_output=True, text=True, check=True
        ).stdout
    )


def measure_heartbeat_s(run: RunFolder) -> float:
    """Return the CPU seconds of a heartbeat, including the check for a request of `paceline doctor`."""
    run.ranks.mkdir()
    writer = heartbeat_writer.HeartbeatWriter(run, 0, 1, 60.0, 60.0)
    start = time.process_time()
    for _ in range(NUM_HEARTBEATS):
        beat.write(run.alive(0), writer._now())
        writer._answer(run)
    return (time.process_time() - start) / NUM_HEARTBEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    print(read_cpu().name)
    writer = heartbeat_writer.HeartbeatWriter(None, 0, 1, 60.0, 60.0)
    start = time.perf_counter()
    for index in range(100_000):
        writer.enter("data" if index % 2 else "forward")
    print(f"one change of phase: {(time.perf_counter() - start) / 100_000 * 1e6:.2f} µs")
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure_heartbeat_s(RunFolder(Path(folder)))
        print(
            f"one heartbeat: {seconds * 1e6:.0f} µs of CPU, "
            f"{seconds / heartbeat_writer.EVERY_S:.3%} of the time"
        )
    plain, recorded = measure_call_s(0), measure_call_s(FLIGHT_RECORDER_SIZE)
    print(f"one collective: {plain * 1e6:.1f} µs, with the flight recorder {recorded * 1e6:.1f} µs")
    with Ranks(2) as ranks:
        ratios = []
        without: list[float] = []
        for _ in range(options.times):
            with tempfile.TemporaryDirectory() as without_beats, tempfile.TemporaryDirectory() as with_beats:
                disabled_s, enabled_s = (
                    ranks(heartbeat.measure_step_s, path, options.steps, heartbeats, timeout_s=120)[0]
                    for path, heartbeats in ((without_beats, False), (with_beats, True))
                )
            without.append(disabled_s)
            ratios.append(enabled_s / disabled_s - 1)
        print(
            f"2 ranks, ddp, {statistics.median(without) * 1e3:.2f} ms per step: "
            f"{statistics.median(ratios):+.2%} (of {options.times}: {min(ratios):+.2%} to {max(ratios):+.2%})"
        )


if __name__ == "__main__":
    main()

"""What heartbeats and the flight recorder take from a step: the same training with and without them, in turns, on one process and on two.

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

import heartbeat  # by the name that the ranks know
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

WARM_UP = 20
BEATS = 2000


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Neither notes nor files."""
    nothing: Any = lambda *_: None  # noqa: E731
    with (
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "enter", nothing),
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "done", nothing),
        mock.patch.object(heartbeat_writer.HeartbeatWriter, "__enter__", lambda self: self),
    ):
        yield


def step_s(folder: str, steps: int, beats: bool) -> float:
    """The mean step of a training of the digits task."""
    from paceline.training.loop import train

    spec = Spec(
        task="digits", steps=steps, save=Save(minutes=float("inf")), evaluate_every=10**6, profile=False
    )
    with contextlib.nullcontext() if beats else silent():
        run = RunFolder(Path(folder))
        taken = [event.step_s for event in train(spec, parse("ddp"), run=run) if isinstance(event, Step)]
    return statistics.mean(taken[WARM_UP:])


CALLS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, taken = torch.ones(31), []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(300):
        dist.all_reduce(x)
    taken.append((time.perf_counter() - began) / 300)
print(min(taken))
"""


def call_s(remembered: int) -> float:
    """The least time of a collective that does nothing, with so many in the flight recorder."""
    environ = os.environ | {"TORCH_FR_BUFFER_SIZE": str(remembered), "OMP_NUM_THREADS": "1"}
    return float(
        subprocess.run(
            [sys.executable, "-c", CALLS], env=environ, capture_output=True, text=True, check=True
        ).stdout
    )


def beat_s(run: RunFolder) -> float:
    """What writing down where a rank is takes of a core, with the look at whether somebody has asked more."""
    run.ranks.mkdir()
    call = heartbeat_writer.HeartbeatWriter(run, 0, 1, 60.0, 60.0)
    began = time.process_time()
    for _ in range(BEATS):
        beat.write(run.alive(0), call._now())
        call._answer(run)
    return (time.process_time() - began) / BEATS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--times", type=int, default=7)
    asked = options.parse_args()
    print(read_cpu().name)
    call = heartbeat_writer.HeartbeatWriter(None, 0, 1, 60.0, 60.0)
    began = time.perf_counter()
    for at in range(100_000):
        call.enter("data" if at % 2 else "forward")
    print(f"one change of phase: {(time.perf_counter() - began) / 100_000 * 1e6:.2f} µs")
    with tempfile.TemporaryDirectory() as folder:
        seconds = beat_s(RunFolder(Path(folder)))
        print(
            f"one heartbeat: {seconds * 1e6:.0f} µs of a core, {seconds / heartbeat_writer.EVERY_S:.3%} of the time"
        )
    plain, recorded = call_s(0), call_s(FLIGHT_RECORDER_SIZE)
    print(f"one collective: {plain * 1e6:.1f} µs, in the flight recorder {recorded * 1e6:.1f} µs")
    with Ranks(2) as ranks:
        ratios = []
        without: list[float] = []
        for _ in range(asked.times):
            with tempfile.TemporaryDirectory() as without_beats, tempfile.TemporaryDirectory() as with_beats:
                quiet = ranks(heartbeat.step_s, without_beats, asked.steps, False, timeout_s=120)[0]
                beating = ranks(heartbeat.step_s, with_beats, asked.steps, True, timeout_s=120)[0]
            without.append(quiet)
            ratios.append(beating / quiet - 1)
        print(
            f"2 ranks, ddp, {statistics.median(without) * 1e3:.2f} ms a step: "
            f"{statistics.median(ratios):+.2%} (of {asked.times}: {min(ratios):+.2%} to {max(ratios):+.2%})"
        )


if __name__ == "__main__":
    main()

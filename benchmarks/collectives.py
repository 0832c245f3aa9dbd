"""Overhead of the timer of `bench collectives` over a bare loop of all-reduces of 1 MiB, measured in turns.

python benchmarks/collectives.py [--rounds 120] [--bytes 1048576]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from machine import description
from paceline.bench.collectives.backends import TORCH_IN_PLACE, TorchPeers
from paceline.bench.collectives.operations import GroupRank
from paceline.bench.timer import Budget, measure

RANKS, REPETITIONS = 2, 20  # few, so that both loops of a round see the same load
EMPTY_LOOP = Budget(seconds=1e9, max_count=1000)


def do_nothing() -> None:
    pass


def time_bare(tensor: torch.Tensor) -> float:
    """Return the seconds of one all-reduce, from a loop that reads the clock at its start and end."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / REPETITIONS


def time_with_paceline(tensor: torch.Tensor) -> float:
    """Return the mean seconds of one all-reduce by Paceline's timer, with a clock reading per repetition."""
    run = TORCH_IN_PLACE["all-reduce"](None, GroupRank(dist.get_rank(), RANKS), tensor, tensor)
    peers = TorchPeers()
    ends: list[list[float]] = []

    def all_reduce_max(values: list[float]) -> list[float]:
        ends.append(peers.all_reduce_max(values))
        return ends[-1]

    budget = Budget(seconds=1e9, warmup_s=0.0, min_count=1, max_count=REPETITIONS)
    measure(run, budget, all_reduce_max=all_reduce_max)
    return ends[-1][-1] / REPETITIONS


def run_rank(rounds: int, size_bytes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(size_bytes // 4)
    loops = {"bare": partial(time_bare, tensor), "timed": partial(time_with_paceline, tensor)}
    for loop in loops.values():
        loop()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(rounds):
        for name in list(loops)[:: 1 if index % 2 else -1]:
            times[name].append(loops[name]())
    ratios = [timed / bare for timed, bare in zip(times["timed"], times["bare"], strict=True)]
    if dist.get_rank() == 0:
        print(
            f"{description()}; torch {torch.__version__}, gloo, {RANKS} ranks, {size_bytes:,} bytes, "
            f"{rounds} rounds of {REPETITIONS}"
        )
        for name, seconds in times.items():
            print(
                f"{name:6} {statistics.median(seconds) * 1e6:8.1f} µs per all-reduce (median of the rounds)"
            )
        empty_s = measure(do_nothing, EMPTY_LOOP).median_s
        print(f"timer around an empty function: {empty_s * 1e9:.0f} ns per repetition")
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"timed / bare: {median:.4f} (quartiles {low:.4f}–{high:.4f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--bytes", type=int, default=2**20)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds, options.bytes)
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*command, *sys.argv], check=False, env=environ).returncode)

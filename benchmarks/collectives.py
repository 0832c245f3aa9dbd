"""What the timer of `bench collectives` costs: an all-reduce of 1 MiB in its hands and in a bare loop, taking turns in the same two ranks.

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

RANKS, REPETITIONS = 2, 20  # few, so that both loops of a round meet the same machine


EMPTY = Budget(seconds=1e9, most=1000)


def nothing() -> None:
    pass


def bare(tensor: torch.Tensor) -> float:
    """Seconds of one all-reduce, as a loop written by hand has them: one look at the clock before and one behind."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor)
    return (time.perf_counter() - began) / REPETITIONS


def timed(tensor: torch.Tensor) -> float:
    """The same by Paceline's timer, which looks at the clock after each; the mean of its repetitions, to compare like with like."""
    run = TORCH_IN_PLACE["all-reduce"](None, GroupRank(dist.get_rank(), RANKS), tensor, tensor)
    peers = TorchPeers()
    ends: list[list[float]] = []

    def largest(values: list[float]) -> list[float]:
        ends.append(peers.largest(values))
        return ends[-1]

    measure(run, Budget(seconds=1e9, warmup_s=0.0, least=1, most=REPETITIONS), largest=largest)
    return ends[-1][-1] / REPETITIONS


def rank(rounds: int, size_bytes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(size_bytes // 4)
    ways = {"bare": partial(bare, tensor), "timed": partial(timed, tensor)}
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds):
        for name in list(ways)[:: 1 if at % 2 else -1]:
            found[name].append(ways[name]())
    ratios = [one / other for one, other in zip(found["timed"], found["bare"], strict=True)]
    if dist.get_rank() == 0:
        print(
            f"{description()}; torch {torch.__version__}, gloo, {RANKS} ranks, {size_bytes:,} bytes, {rounds} rounds of {REPETITIONS}"
        )
        for name, seconds in found.items():
            print(f"{name:6} {statistics.median(seconds) * 1e6:8.1f} µs an all-reduce (median of the rounds)")
        print(f"the timer around nothing: {measure(nothing, EMPTY).median_s * 1e9:.0f} ns a repetition")
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"timed / bare: {median:.4f} (quartiles {low:.4f}–{high:.4f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--bytes", type=int, default=2**20)
    asked = parser.parse_args()
    if "RANK" in os.environ:
        rank(asked.rounds, asked.bytes)
    else:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *sys.argv]
        sys.exit(
            subprocess.run(
                [sys.executable, *words], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
            ).returncode
        )

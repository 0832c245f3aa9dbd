"""Two contenders in the same ranks that take turns, a block of steps each; what counts is the ratio of two neighbouring blocks."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 4
Step = Callable[[], Any]


def seconds(step: Step) -> float:
    """Of a step, the mean of a block."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(BLOCK):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / BLOCK


def compare(name: str, ours: Step, by_hand: Step, rounds: int) -> None:
    """Print steps/s of `ours` beside those of `by_hand`: the median and the quartiles of the rounds."""
    contenders = {"hand": by_hand, "ours": ours}
    for step in contenders.values():
        seconds(step)
        seconds(step)
    ratios, own = [], []
    for at in range(rounds):
        took = {
            which: seconds(contenders[which]) for which in (("hand", "ours") if at % 2 else ("ours", "hand"))
        }
        ratios.append(took["hand"] / took["ours"])
        own.append(took["ours"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    say(
        f"{name:24} {1e3 * statistics.median(own):7.1f} ms a step; steps/s of those by hand: {middle:.3f} ({low:.3f}–{high:.3f})"
    )


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(doc: str, be_a_rank: Callable[[int], None], sizes: Sequence[int]) -> None:
    """`be_a_rank(rounds)` on so many ranks, one size after the other."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        be_a_rank(rounds)
        dist.destroy_process_group()
        return
    import machine

    print(
        f"{machine.description()}, torch {torch.__version__}; gloo, one thread a rank; median (quartiles) of {rounds} rounds",
        flush=True,
    )
    for ranks in sizes:
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            sys.argv[0],
            "--rounds",
            str(rounds),
        ]
        if status := subprocess.run(
            [sys.executable, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}
        ).returncode:
            sys.exit(status)

"""Compare two contenders in the same ranks: blocks of steps alternate, and their ratios count."""

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


def time_block(step: Step, block: int = BLOCK) -> float:
    """Return the mean seconds of a step in a block."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(block):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / block


def compare(
    name: str, paceline: Step, other: Step, rounds: int, block: int = BLOCK, other_name: str = "handwritten"
) -> None:
    """Print the steps/s of `paceline` relative to `other`: median and quartiles of the rounds."""
    contenders = {"other": other, "paceline": paceline}
    for step in contenders.values():
        time_block(step, block)
        time_block(step, block)
    ratios, paceline_s = [], []
    for index in range(rounds):
        order = list(contenders)[:: 1 if index % 2 else -1]
        step_s = {contender: time_block(contenders[contender], block) for contender in order}
        ratios.append(step_s["other"] / step_s["paceline"])
        paceline_s.append(step_s["paceline"])
    low, median, high = statistics.quantiles(ratios, n=4)
    print_on_rank_0(
        f"{name:24} {1e3 * statistics.median(paceline_s):7.1f} ms per step; "
        f"steps/s relative to {other_name}: {median:.3f} ({low:.3f}–{high:.3f})"
    )


def print_on_rank_0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(doc: str, run_rank: Callable[..., None], sizes: Sequence[int], **defaults: int) -> None:
    """Run `run_rank(rounds, **options)` on each number of ranks in `sizes`.

    defaults: of further options, by name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in ({"rounds": 12} | defaults).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    rounds = options["rounds"]
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        run_rank(**options)
        dist.destroy_process_group()
        return
    import machine

    print(
        f"{machine.description()}, torch {torch.__version__}; gloo, one thread per rank; "
        f"median (quartiles) of {rounds} rounds",
        flush=True,
    )
    for ranks in sizes:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [*torchrun, sys.argv[0], *words]
        if status := subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            sys.exit(status)

"""Time of the checks between ranks before the first step, compared with a bare exchange of objects.

python benchmarks/roll_call.py [--ranks 2 4] [--times 50]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch.distributed as dist

import roll_call as module  # under the name by which the ranks import it
from paceline.cluster.cpu import read_cpu
from paceline.distributed.world import read_world
from paceline.launch.rank_pool import Ranks
from paceline.task import load_task
from paceline.training.checks.rank_checks import check_ranks

SAMPLES = {"train": 1437, "validation": 360}


def exchange_objects() -> None:
    answers: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, SAMPLES)


def run_rank_checks() -> None:
    check_ranks(load_task("digits", {}), read_world(), SAMPLES)


def time_calls(function: Callable[[], None], times: int) -> list[float]:
    """Return the seconds of each call on a rank. The first includes imports and reading of files."""
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args()
    print(
        f"{read_cpu().name}, {read_cpu().usable_cores} cores; ms on the slowest rank: "
        "the first call, and the median of the others"
    )
    for count in options.ranks:
        with Ranks(count) as ranks:
            for function in (module.exchange_objects, module.run_rank_checks):
                by_rank = ranks(module.time_calls, function, options.times, timeout_s=120.0)
                slowest = [max(seconds) for seconds in zip(*by_rank, strict=True)]
                first_ms, others_ms = slowest[0] * 1e3, statistics.median(slowest[1:]) * 1e3
                print(f"{count} ranks, {function.__name__}: {first_ms:.1f}, {others_ms:.1f}")


if __name__ == "__main__":
    main()

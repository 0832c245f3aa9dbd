"""What it costs a start that the ranks meet before the first step and find out what does not fit; beside it, a bare exchange of objects.

python benchmarks/roll_call.py [--ranks 2 4] [--times 50]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch.distributed as dist

import roll_call as here  # by the name that the ranks know
from paceline.cluster.cpu import read_cpu
from paceline.distributed.world import read_world
from paceline.launch.rank_pool import Ranks
from paceline.task import load_task
from paceline.training.rank_checks import check_ranks

SAMPLES = {"train": 1437, "validation": 360}


def bare() -> None:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, SAMPLES)


def whole() -> None:
    check_ranks(load_task("digits", {}), read_world(), SAMPLES)


def seconds(what: Callable[[], None], times: int) -> list[float]:
    """On a rank; the first, which imports and reads, is among them."""
    found = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args()
    print(
        f"{read_cpu().name}, {read_cpu().usable_cores} cores; ms on the rank that takes longest: the first, and the median of the others"
    )
    for count in options.ranks:
        with Ranks(count) as ranks:
            for what in (here.bare, here.whole):
                each = [
                    max(all_s)
                    for all_s in zip(*ranks(here.seconds, what, options.times, timeout_s=120.0), strict=True)
                ]
                print(
                    f"{count} ranks, {what.__name__}: {each[0] * 1e3:.1f}, {statistics.median(each[1:]) * 1e3:.1f}"
                )


if __name__ == "__main__":
    main()

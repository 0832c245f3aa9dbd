"""The process that samples a node while a run trains: python -P -m paceline.monitor.sampler_main …

Rank 0 of the node starts it (see `paceline.monitor.sampler_process`), and it ends with that rank.
"""

import ctypes
import os
import platform
import signal
import sys
import time
from pathlib import Path

from paceline.errors import Error
from paceline.monitor.processes import RankSensor, find_run_ranks
from paceline.monitor.sample_writer import CONTINUES, describe_lost_rows, open_sample_file
from paceline.monitor.sampler import Sampler, sample

PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h
NICENESS = 5
LOOK_S = 1.0  # how often to look whether the parent is alive, besides the signal at its death
MAX_NOTES = 3
MAX_READ = 1024  # heartbeats that are read to find the ranks of a node


def main(words: list[str]) -> int:
    """Sample until the parent ends. words: folder of the run, parent, seconds, rank, local size, size."""
    run = Path(words[0])
    parent, every_s, rank, local_size, size = int(words[1]), float(words[2]), *map(int, words[3:6])
    die_with_parent(parent)
    # Slurm and terminals send these to all processes of a job. The run may save after them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    host = platform.node()

    def find() -> dict[int, int]:
        found: dict[int, int] = {}
        for candidates in guess_ranks(rank, local_size, size):
            found = find_run_ranks(run / "ranks", candidates, host)
            if len(found) == local_size:
                break
        return found

    writer = open_sample_file(run / "monitor", host)
    sampler = Sampler(RankSensor(find, local_size), run)
    lost = notes = 0

    def is_over(wait_s: float) -> bool:
        nonlocal lost, notes
        if writer.lost and not lost and notes < MAX_NOTES:
            print(f"{CONTINUES}{describe_lost_rows(writer.path)}", file=sys.stderr, flush=True)
            notes += 1
        lost = writer.lost
        end = time.monotonic() + wait_s
        while (left_s := end - time.monotonic()) > 0 and os.getppid() == parent:
            time.sleep(min(left_s, LOOK_S))
        return os.getppid() != parent

    sample(sampler, writer, every_s, is_over)
    return 0


def guess_ranks(rank: int, local_size: int, size: int) -> list[range]:
    """Return which ranks may be on the node of a rank, the most likely first.

    Consecutive ranks, or one rank per node in turn. All ranks only if they are few: each is a file on a
    shared file system.
    """
    nodes = max(1, size // local_size)
    guesses = [range(rank, min(size, rank + local_size)), range(rank, size, nodes)]
    return [*guesses, range(size)] if size <= MAX_READ else guesses


def die_with_parent(parent: int) -> None:
    """Make the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        sys.exit(0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Error as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # the top of the sampler: the rank that started it reports the sentence
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)

"""The barrier through shared memory: no rank passes before all arrived; if one is late, all meet in gloo."""

import contextlib
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from faults import replaced
from harness import ranks
from paceline.distributed import shared_barrier
from paceline.distributed.shared_barrier import SharedMemoryBarrier
from paceline.distributed.shared_memory import SharedMemory, open_shared_memory

pytestmark = pytest.mark.processes
BEGIN = 4096  # of the barrier's bytes; before them, each rank writes how often it arrived
LONG_S = 60.0


def open_memory() -> SharedMemory:
    memory = open_shared_memory(2 * BEGIN)
    assert memory is not None
    return memory


def count_collectives(counts: list[int]) -> Any:
    def patch(all_reduce: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            counts[0] += 1
            return all_reduce(*args, **options)

        return counted

    return replaced(dist, "all_reduce", patch)


def without_waiting() -> Any:
    return replaced(SharedMemoryBarrier, "__call__", lambda wait: lambda barrier: None)


def pass_barriers(poll_s: list[float], late_s: float, fault: Any = contextlib.nullcontext) -> tuple[int, int]:
    """Return the number of barriers that this rank passed too early, and that of collectives.

    poll_s: by rank. late_s: the longest time by which a rank is late.
    """
    rank, draw = dist.get_rank(), random.Random(dist.get_rank())
    memory = open_memory()
    barrier = SharedMemoryBarrier(memory, BEGIN, poll_s[rank])
    written = [of_rank[64:72].view(torch.int64) for of_rank in memory.by_rank]
    early, calls = 0, [0]
    with fault(), count_collectives(calls):
        for number in range(1, 101):
            if late_s:
                time.sleep(late_s * draw.random())
            written[rank].fill_(number)
            barrier()
            early += any(int(other) < number for other in written)
    dist.barrier()
    return early, calls[0]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("poll_s", [0.0, 0.0005, LONG_S])
def test_no_rank_passes_before_all_arrived(size: int, poll_s: float) -> None:
    results = ranks(size)(pass_barriers, [poll_s] * size, 0.001)
    assert {early for early, _ in results} == {0}
    [collectives] = {calls for _, calls in results}  # all ranks decide the same
    assert collectives <= 100 if poll_s < LONG_S else collectives == 0


def test_ranks_that_poll_for_different_times_decide_the_same() -> None:
    for first_s, second_s in ((0.0, LONG_S), (LONG_S, 0.0), (0.0002, 0.0004)):
        (early, collectives), other = ranks(2)(pass_barriers, [first_s, second_s], 0.001)
        assert (early, collectives) == (0, other[1])


def test_ranks_that_do_not_wait_are_found() -> None:
    results = ranks(2)(pass_barriers, [LONG_S] * 2, 0.001, without_waiting)
    assert any(early for early, _ in results)


def wait_for_late_rank(late_s: float) -> int:
    barrier, calls = SharedMemoryBarrier(open_memory(), BEGIN), [0]
    with count_collectives(calls):
        barrier()  # without a late rank, to begin together
        before = calls[0]
        time.sleep(late_s * dist.get_rank())
        barrier()
    return calls[0] - before


def test_all_ranks_meet_in_a_collective_if_one_is_late() -> None:
    """Then gloo, the flight recorder and doctor see that ranks wait."""
    assert ranks(2)(wait_for_late_rank, 50 * shared_barrier.POLL_S) == [1, 1]


def count_shown_waits() -> int:
    barrier, calls = SharedMemoryBarrier(open_memory(), BEGIN, LONG_S), [0]
    with count_collectives(calls):
        for number in range(30):
            shared_barrier.show_waits(dist.get_rank() == 1 and number % 3 == 0)
            barrier()
    return calls[0]


def test_one_rank_that_traces_makes_barriers_collectives() -> None:
    assert ranks(2)(count_shown_waits) == [10, 10]


def test_ranks_without_a_core_each_do_not_poll() -> None:
    for poll_s in ranks(2)(read_poll_s):
        assert poll_s == [shared_barrier.POLL_S, 0.0]


def read_poll_s() -> list[float]:
    found = []
    for cores in (2, 1):
        with replaced(shared_barrier, "usable_cores", lambda _, cores=cores: lambda: cores):
            found.append(SharedMemoryBarrier(open_memory(), BEGIN)._poll_s)
    return found

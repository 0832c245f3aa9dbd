"""A barrier between the ranks of one machine, through memory that they share.

A collective of gloo wakes several threads on each rank, which takes longer than the whole exchange of small
tensors. Here a rank writes the number of its arrival to shared memory, and polls those of the others for a
few milliseconds. If a rank is late, all ranks wait in a collective, so that lost and stopped ranks are found
as in any collective: by gloo, torch's flight recorder and `paceline doctor`.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from paceline.cluster.limits import usable_cores
from paceline.distributed.shared_memory import SharedMemory

POLL_S = 0.005
COLLECTIVE = 0  # index of the last barrier that is a collective; the arrivals of the ranks follow

_is_traced = False


def show_waits(is_traced: bool) -> None:
    """Let all barriers be collectives, which traces show. One rank that wants it is enough."""
    global _is_traced
    _is_traced = is_traced


class SharedMemoryBarrier:
    """Lets each rank wait until all ranks have called it as often. A collective in each call.

    memory: of the ranks of the default process group. begin: of BARRIER_BYTES of the first rank's memory,
    which are zero before. poll_s: how long a rank polls; None: POLL_S if each rank has a core, else 0.
    """

    def __init__(self, memory: SharedMemory, begin: int, poll_s: float | None = None):
        ranks = len(memory.by_rank)
        own_bytes = memory.by_rank[0][begin : begin + 8 * (1 + ranks)]
        self._numbers = own_bytes.numpy().data.cast("q")
        self._memory = memory  # keeps the file open
        self._own, self._count = 1 + dist.get_rank(), 0
        has_cores = ranks <= usable_cores()
        self._poll_s = poll_s if poll_s is not None else POLL_S if has_cores else 0.0
        self._arrived = torch.zeros(1)

    def __call__(self) -> None:
        """Wait for all ranks. Raises RuntimeError if one is lost."""
        self._count += 1
        with self._locked():
            self._numbers[self._own] = self._count
            if _is_traced:
                self._numbers[COLLECTIVE] = self._count
        if self._poll() or not self._begin_collective():
            return
        dist.all_reduce(self._arrived)

    def _poll(self) -> bool:
        """Return whether all ranks arrived, and none of them waits in a collective."""
        end_s = time.perf_counter() + self._poll_s
        while not self._have_all_arrived():
            if self._numbers[COLLECTIVE] == self._count or time.perf_counter() >= end_s:
                return False
            os.sched_yield()
        with self._locked():  # also orders the memory: what the others wrote before they arrived is visible
            return self._numbers[COLLECTIVE] != self._count

    def _begin_collective(self) -> bool:
        """Return whether all ranks wait in a collective, which this rank decides if others are missing.

        The lock makes the decision the same on all ranks: it is final when the last rank arrives.
        """
        with self._locked():
            if not self._have_all_arrived():
                self._numbers[COLLECTIVE] = self._count
            return self._numbers[COLLECTIVE] == self._count

    def _have_all_arrived(self) -> bool:
        return min(self._numbers[1:]) >= self._count

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of all ranks, for some microseconds. A killed rank releases it."""
        fcntl.lockf(self._memory.lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._memory.lock_file, fcntl.LOCK_UN)

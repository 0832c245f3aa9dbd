"""Staging: processes of a node that fill a cache, before the first step or while the training runs."""

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from paceline.data.cache.dataset import CachedDataset
from paceline.data.workers import ForkedReaders
from paceline.errors import DataError

NICENESS = 10  # of processes that fill a cache while the training runs


def staged_range(samples: int, part: int, parts: int) -> range:
    """Return the neighboring samples that one of the processes of a node reads."""
    return range(samples * part // parts, samples * (part + 1) // parts)


class Staging:
    """Processes that read the share of this rank of all samples once, in the order of the dataset.

    dataset: to fill. local_rank, local_size: of this rank on the node. processes: of this rank.
    """

    def __init__(self, dataset: CachedDataset, local_rank: int, local_size: int, processes: int):
        self.dataset = dataset
        first, parts = local_rank * processes, local_size * processes
        self._ranges = [staged_range(len(dataset), part, parts) for part in range(first, first + processes)]
        self._running: Sequence[BaseProcess] = ()

    def start(self, niceness: int = NICENESS) -> None:
        """Start the processes."""
        context = ForkedReaders()
        self._running = [
            context.Process(target=_fill, args=(self.dataset, indices, os.getpid(), niceness), daemon=True)
            for indices in self._ranges
        ]
        for process in self._running:
            process.start()

    def wait(self) -> None:
        """Wait until all samples of this rank are stored, or the cache is full. Raises DataError."""
        for process in self._running:
            process.join()
        if failed := [process for process in self._running if process.exitcode]:
            raise DataError(
                f"a process that fills the cache ended with status {failed[0].exitcode}; use data.stage=off"
            )

    def close(self) -> None:
        """End the processes that still run."""
        for process in self._running:
            if process.is_alive():
                process.kill()  # the store stays whole
            process.join()


def _fill(dataset: CachedDataset, indices: range, parent: int, niceness: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank ends this process
    with contextlib.suppress(OSError):
        os.nice(niceness)
    for index in indices:
        if os.getppid() != parent or dataset.store.is_full:
            return
        with contextlib.suppress(Exception):  # the training reports a sample that cannot be read, if it does
            dataset.fill(index)

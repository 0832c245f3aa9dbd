"""Processes of a node: their identity, their ranks, and what they use."""

import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from paceline.files import open_regular
from paceline.monitor.node import MB, MIB
from paceline.monitor.sensor import RateMeter, Sensor

MAX_HEARTBEAT_BYTES = 2**20
SCAN_EVERY = 5  # samples between two searches for child processes
MAX_PAUSE = 60  # samples between two searches for ranks that are expected
MAX_RANKS = 2**20
MAX_STATUS_BYTES = 2**14
OF_RANK = (
    "cpu",
    "memory",
    "file memory",
    "read",
    "write",
    "workers",
    "workers cpu",
    "workers memory",
    "workers file memory",
)


def process_birth(pid: int) -> float | None:
    """Return a number that distinguishes a process from earlier and later processes with the same id.

    On Linux: clock ticks from boot to the start of the process; elsewhere: seconds since the epoch. psutil's
    create_time adds the boot time in whole seconds, and changes whenever the clock is set.
    Returns None if no process has this id."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def find_run_ranks(folder: Path, ranks: Sequence[int], host: str) -> dict[int, int]:
    """Return the process ids by rank of those ranks of a run that run on this host.

    folder: the folder with the heartbeats, ranks/ of a run
    """
    found = {}
    for rank in ranks:
        # Not `doctor.heartbeat.read`: its validation takes longer to import than the whole sampler.
        try:
            with open_regular(folder / f"{rank}.alive") as file:
                beat = json.loads(file.read(MAX_HEARTBEAT_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(beat, dict) or beat.get("rank") != rank or beat.get("host") != host:
            continue
        pid, birth = beat.get("pid"), beat.get("birth")
        if isinstance(pid, int) and 0 < pid < 2**31 and birth is not None and process_birth(pid) == birth:
            found[rank] = pid
    return found


def find_descendants(pid: int) -> list[int]:
    """Return the process ids of the children of a process, and of their children."""
    found: list[int] = []
    pending = deque([pid])
    while pending:
        parent = pending.popleft()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:  # it has ended
            continue
        for thread in threads:
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                pending += children
    return found


class RankSensor(Sensor):
    """What the ranks of this node use.

    find    returns the process ids by rank; called when ranks are missing, less and less often
    expect  the number of ranks of this node; None if it is not known
    ignore  processes that do not count as workers of a rank, such as this sampler
    """

    def __init__(
        self, find: Callable[[], Mapping[int, int]], expect: int | None = None, ignore: Sequence[int] = ()
    ):
        super().__init__()
        self._find, self._expect, self._ignore = find, expect, {*ignore, os.getpid()}
        self._ranks: dict[int, tuple[psutil.Process, float | None]] = {}
        self._workers: dict[int, list[psutil.Process]] = {}
        self._meter = RateMeter()
        self._samples_until_search, self._pause = 0, 1
        self._samples_until_scan = 0

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that were found."""
        return {rank: process.pid for rank, (process, _) in self._ranks.items()}

    def all_pids(self) -> set[int]:
        """Return the process ids of the ranks and of their workers."""
        return {*self.pids.values(), *(worker.pid for many in self._workers.values() for worker in many)}

    def cores(self) -> set[int]:
        """Return the cores that the ranks may use."""
        cores: set[int] = set()
        for process, _ in self._ranks.values():
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                cores |= set(process.cpu_affinity() or ())
        return cores

    def search(self) -> bool:
        """Find ranks that are missing. Return whether ranks were found that were not known before."""
        alive = [
            rank for rank, (process, birth) in self._ranks.items() if process_birth(process.pid) == birth
        ]
        if self._expect is not None and len(alive) >= self._expect:
            return False
        self._samples_until_search -= 1
        if self._samples_until_search > 0:
            return False
        is_new = False
        for rank, pid in self._find().items():
            known = self._ranks.get(rank)
            if known is not None and known[0].pid == pid and rank in alive:
                continue
            if len(self._ranks) >= MAX_RANKS:
                break
            with contextlib.suppress(psutil.Error):
                self._ranks[rank] = (psutil.Process(pid), process_birth(pid))
                self.comments[f"rank{rank}"] = f"process {pid}"
                is_new = True
        # A rank that is late is found within seconds; one that never comes costs little.
        self._pause = (
            1 if is_new else min(MAX_PAUSE if self._expect is not None else SCAN_EVERY, 2 * self._pause)
        )
        self._samples_until_search = self._pause
        if is_new:
            self._samples_until_scan = 0
            self._ranks = dict(sorted(self._ranks.items()))
            self.columns = [f"rank{rank} {name}" for rank in self._ranks for name in OF_RANK]
        return is_new

    def read(self, now: float) -> Sequence[float | None]:
        self._samples_until_scan -= 1
        if self._samples_until_scan < 0:
            self._scan()
        counts: dict[str, float] = {}
        memory: dict[int, float] = {}
        of_files: dict[int, float | None] = {}
        for rank, (process, birth) in self._ranks.items():
            for worker in [process, *self._workers.get(rank, ())]:
                used = _read_process(worker)
                if used is None or (worker is process and process_birth(process.pid) != birth):
                    continue
                cpu_s, memory[worker.pid], io = used
                of_files[worker.pid] = _read_file_memory(worker.pid)
                counts[f"cpu {worker.pid}"] = cpu_s
                if io is not None:
                    counts[f"read {worker.pid}"], counts[f"write {worker.pid}"] = io
        rates = self._meter.rates(counts, now)
        row: list[float | None] = []
        for rank, (process, _) in self._ranks.items():
            workers = [worker.pid for worker in self._workers.get(rank, ()) if worker.pid in memory]
            is_alive = process.pid in memory
            row += [
                _sum(rates, "cpu", [process.pid], 100),
                memory[process.pid] if is_alive else None,
                of_files.get(process.pid),
                _sum(rates, "read", [process.pid, *workers], 1 / MB),
                _sum(rates, "write", [process.pid, *workers], 1 / MB),
                float(len(workers)) if is_alive else None,
                (_sum(rates, "cpu", workers, 100) if workers else 0.0) if is_alive else None,
                sum(memory[pid] for pid in workers) if is_alive else None,
                _add(of_files, workers) if is_alive else None,
            ]
        return row

    def _scan(self) -> None:
        """Find the workers of the ranks."""
        self._samples_until_scan = SCAN_EVERY
        of_ranks = {*self.pids.values()} | self._ignore
        for rank, (process, _) in self._ranks.items():
            before = {worker.pid: worker for worker in self._workers.get(rank, ())}
            workers = []
            for pid in find_descendants(process.pid):
                if pid not in of_ranks:
                    with contextlib.suppress(psutil.Error):
                        workers.append(before.get(pid) or psutil.Process(pid))
            self._workers[rank] = workers


def _read_process(process: psutil.Process) -> tuple[float, float, tuple[float, float] | None] | None:
    """Return processor seconds, resident MiB, and bytes read and written (None if this is not permitted).

    Returns None if the process has ended.
    """
    try:
        times = process.cpu_times()
        memory = process.memory_info().rss / MIB
    except (psutil.Error, OSError):
        return None
    try:
        io = process.io_counters()
    except (psutil.Error, OSError):
        return times.user + times.system, memory, None
    return times.user + times.system, memory, (float(io.read_bytes), float(io.write_bytes))


def _read_file_memory(pid: int) -> float | None:
    """Return the resident MiB of files that a process has mapped; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read(MAX_STATUS_BYTES)
        return int(text.partition(b"\nRssFile:")[2].split(maxsplit=1)[0]) / 1024
    return None


def _add(values: Mapping[int, float | None], pids: Sequence[int]) -> float | None:
    known = [value for pid in pids if (value := values.get(pid)) is not None]
    return sum(known) if len(known) == len(pids) else None


def _sum(rates: Mapping[str, float | None], what: str, pids: Sequence[int], factor: float) -> float | None:
    known = [rate for pid in pids if (rate := rates.get(f"{what} {pid}")) is not None]
    return factor * sum(known) if known else None

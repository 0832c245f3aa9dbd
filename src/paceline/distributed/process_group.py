"""The device, threads and process group of a rank."""

import contextlib
import ctypes
import itertools
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.cluster.limits import BUSY_SAMPLE_S, busy_cores, free_cores, usable_cores
from paceline.distributed.network_interface import (
    check_interfaces,
    choose_interface,
    choose_listen_address,
    is_local_host,
    restore_interface_variables,
    use_loopback,
)
from paceline.distributed.pmi import connect_pmi
from paceline.distributed.store import LOOPBACK, open_store
from paceline.distributed.world import World
from paceline.errors import LaunchError
from paceline.events import Event, Started
from paceline.files import read_own, write_secret


class StartClock:
    """The duration of each phase of a start."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase. The next phase starts now."""
        now = time.perf_counter()
        self.seconds[phase], self._since = now - self._since, now

    def add_start_times(self, events: Generator[Event]) -> Generator[Event]:
        """Yield events. A `Started` event ends the last phase and gets the durations of all phases."""
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, Started):
                    self.mark("state")
                    event = replace(event, start_s=dict(self.seconds))
                yield event


def choose_device(world: World, requested: str | None) -> torch.device:
    """Return the accelerator of this local rank, or the CPU. Raises LaunchError if there are too few."""
    if requested == "cpu" or (requested is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"device={requested}, but torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"{world.local_size} ranks on this machine require {world.local_size} GPUs, got "
            f"{torch.cuda.device_count()}; use --ranks {torch.cuda.device_count()} or --device cpu"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def threads_per_rank(local_size: int, requested: int | None) -> int:
    """Return the number of torch threads per rank with which ranks do not oversubscribe a machine's cores."""
    return requested or max(1, usable_cores() // local_size)


def count_free_threads(world: World) -> tuple[int, str | None]:
    """Return the number of torch threads per rank that other processes leave free, and a note.

    The number is the same on all ranks.

    The note is None unless they leave less than the share of this training. A collective, during which all
    ranks are idle.
    """
    share = threads_per_rank(world.local_size, None)
    if world.size > 1:
        dist.barrier()  # so that the work of the ranks themselves does not count
    busy = busy_cores(BUSY_SAMPLE_S) or 0.0
    free = free_cores(busy) / world.local_size
    local = torch.tensor(
        [-max(1, min(share, math.floor(free + 0.5))), share > free + 0.5, busy], dtype=torch.float64
    )
    if world.size > 1:
        dist.all_reduce(local, dist.ReduceOp.MAX)
    threads, is_short, max_busy = -int(local[0]), bool(local[1]), local[2].item()
    where = "this machine" if world.local_size == world.size else "a node"
    return (
        threads,
        f"{where} is oversubscribed: other processes keep {max_busy:.1f} of {usable_cores()} cores busy"
        if is_short
        else None,
    )


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory.

    Each step allocates the same sizes again, and the kernel would have to clear new pages each time.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def workers_per_rank(local_size: int, device: torch.device, requested: int | None) -> int:
    """Return the number of processes per rank that read samples.

    It is 0 without a GPU, because every core computes then.
    """
    if requested is not None:
        return requested
    return min(4, max(0, usable_cores() // local_size - 1)) if device.type == "cuda" else 0


FLIGHT_RECORDER_SIZE = 64  # collectives in torch's flight recorder, which `paceline doctor` reads
RECORDED_PER_STEP, MAX_RECORDED = 256, 2048  # the same for a trace; reading 2048 takes about 0.1 s
# Minimum timeout until each rank has run all kinds of operations of a step once.
START_TIMEOUT_S = 600.0
SLOW_START_S = 60.0  # after which rank 0 reports for which ranks it waits
SAVE_TIMEOUT_S = 1800.0  # the same while ranks write a checkpoint, for the slowest of them


def start_timeout_s(timeout_s: float) -> float:
    """Return the timeout at the start of a training with a timeout of `timeout_s`."""
    return max(timeout_s, START_TIMEOUT_S)


@contextlib.contextmanager
def process_group(
    world: World, device: torch.device, timeout_s: float, meeting_place: Path, traced_steps: int = 0
) -> Iterator[None]:
    """Create the default process group for this context, with the timeout of a start, unless it exists.

    meeting_place: a folder that all ranks see, for launchers that provide no store.
    traced_steps: number of steps whose collectives the flight recorder keeps for a trace.
    """
    timeout_s = start_timeout_s(timeout_s)
    if dist.is_initialized():
        yield
        return
    # torch reads it when it creates the first process group.
    recorded = min(MAX_RECORDED, max(FLIGHT_RECORDER_SIZE, traced_steps * RECORDED_PER_STEP))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(recorded))
    check_interfaces()
    store = _rendezvous(world, timeout_s, meeting_place)
    with restore_interface_variables():
        if world.local_size < world.size:
            choose_interface(store, world.size)
        else:
            use_loopback()
        if device.type == "cuda":
            claim_gpu(store, str(torch.cuda.get_device_properties(device).uuid), world.rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            store=store,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def claim_gpu(store: dist.Store, gpu: str, rank: int) -> None:
    """Raise LaunchError if another rank has the same GPU, because NCCL would not start."""
    holder = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if holder != str(rank):
        raise LaunchError(
            f"ranks {holder} and {rank} both have GPU {gpu}, but each rank requires a different GPU; "
            "let the launcher set local ranks, and check CUDA_VISIBLE_DEVICES"
        )


def set_collective_timeout(timeout_s: float, exclude: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of collectives in all process groups but `exclude`.

    torch 2.13: a group that is created without a timeout has 30 minutes, even if the default group has less.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group is not exclude:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


_group_numbers = itertools.count()  # of the process groups of this process
# by the address that all ranks of this start were given; several process groups may use one store
_open_stores: dict[str, dist.TCPStore] = {}


def _rendezvous(world: World, timeout_s: float, meeting_place: Path) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    if world.size == 1:
        return dist.HashStore()
    if world.launcher == "torchrun":
        store = _store_at(world, timeout, open_here=world.rank == 0 and not world.old_store)
        # torch 2.13: the agent keeps its store, with the addresses of ended ranks, over restarts and process
        # groups. Agents of several nodes may count restarts differently, but then each has a separate store.
        return dist.PrefixStore(
            f"paceline/{world.restart if world.old_store else 0}/{next(_group_numbers)}", store
        )
    if world.address is not None:
        return _store_at(world, timeout, open_here=world.rank == 0)
    if world.pmi is not None:
        return _meet_through_pmi(world, world.pmi, timeout)
    return meet_through_file(world, timeout, meeting_place)[0]


def _store_at(world: World, timeout: timedelta, open_here: bool) -> dist.TCPStore:
    """Return the store at the address that all ranks were given."""
    if world.address is None:
        raise LaunchError(
            f"{world.launcher} did not set MASTER_ADDR and MASTER_PORT, the address of rank 0; set them, or "
            "start with torchrun"
        )
    host, _, port = world.address.rpartition(":")
    if not open_here:
        return dist.TCPStore(host, int(port), world.size, False, timeout)
    if world.address not in _open_stores:
        is_local = world.local_size == world.size and is_local_host(host)
        listen_address = host if is_local else choose_listen_address(host)[0]
        _open_stores[world.address] = open_store(listen_address, int(port), timeout)
    return _open_stores[world.address]


def _open_store(world: World, timeout: timedelta, may_grow: bool = False) -> tuple[dist.TCPStore, str]:
    """Return a new store, and the address for `_join_store` on the other ranks."""
    is_local = world.local_size == world.size and not may_grow
    address, hosts = (LOOPBACK, [LOOPBACK]) if is_local else choose_listen_address(world.host)
    store = open_store(address, timeout=timeout)
    return store, f"{','.join(hosts)}:{store.port}"


def _join_store(where: str, world: World, timeout: timedelta) -> dist.TCPStore:
    """Return the store of rank 0. Raises OSError if none answers at the address."""
    hosts, _, port = where.rpartition(":")
    for host in hosts.split(","):
        with contextlib.suppress(OSError, dist.DistNetworkError):
            store = dist.TCPStore(host, int(port), world.size, False, timedelta(seconds=5))
            store.set_timeout(timeout)
            return store
    raise OSError(f"no store at {where}")


def _meet_through_pmi(world: World, fd: int, timeout: timedelta) -> dist.Store:
    """Return a store whose address rank 0 publishes through PMI.

    MPICH gives its ranks no common name of their start, as `meet_through_file` requires.
    """
    link, key = connect_pmi(fd, timeout.total_seconds()), f"paceline-{next(_group_numbers)}"
    if world.rank == 0:
        store, where = _open_store(world, timeout)
        link.put(key, where)
        link.barrier()
        return store
    link.barrier()
    where = link.get(key)
    try:
        return _join_store(where, world, timeout)
    except OSError:
        raise LaunchError(
            f"rank {world.rank} on {platform.node()} cannot connect to rank 0 at {where}; check the network "
            "between the nodes"
        ) from None


def name_note(world: World) -> str:
    """Return the name of the file through which the ranks of one start meet."""
    return f".meet-{world.launcher}-{world.job}"


def join_through_file(
    world: World, timeout: timedelta, meeting_place: Path, name: str
) -> tuple[dist.TCPStore, str] | None:
    """Return the store and the key of a running start that may grow, or None if it has ended.

    name: of the file that its rank 0 keeps, from `name_note`.
    """
    try:
        where, key = read_own(meeting_place / name).split()
        return _join_store(where, world, timeout), key
    except (OSError, ValueError):
        return None


def meet_through_file(
    world: World, timeout: timedelta, meeting_place: Path, may_grow: bool = False, noun: str = "rank"
) -> tuple[dist.TCPStore, str]:
    """Return a store that rank 0 opens on a free port, and a secret key that only the ranks share.

    Rank 0 writes the address and the key to a file in `meeting_place`, a folder that all ranks see; other
    users cannot read the file. For mpirun and srun, which provide no store.

    may_grow: whether processes of other machines join later by `join_through_file`. Rank 0 then keeps the
        file, and must delete it.
    noun: what meets, for messages.

    Raises LaunchError if they have not met after `timeout`.
    """
    note = meeting_place / name_note(world)
    if world.rank == 0:
        store, where = _open_store(world, timeout, may_grow)
        key = secrets.token_hex(32)
        meeting_place.mkdir(parents=True, exist_ok=True)
        write_secret(note, f"{where} {key}")
        _wait_for_others(store, world.size, where, timeout, noun)
        if not may_grow:
            note.unlink()
        return store, key
    found = None
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            found, key = read_own(note).split()
            store = _join_store(found, world, timeout)
            store.set(f"here/{world.rank}", "")
            return store, key
        time.sleep(0.05)
    me = f"{noun} {world.rank} on {platform.node()}"
    if found is not None:
        raise LaunchError(
            f"{me} could not connect to {noun} 0 at {found} for {timeout.total_seconds():.0f} s; check the "
            "network between the nodes"
        )
    raise LaunchError(
        f"{me} waited {timeout.total_seconds():.0f} s for {noun} 0 to write {note}; check that {noun} 0 runs "
        f"and that all {noun}s see this folder"
    )


def _wait_for_others(store: dist.Store, size: int, where: str, timeout: timedelta, noun: str) -> None:
    """Wait until the others of `size` have joined. A slow start is reported while it can still succeed.

    where: the address of the store. Raises LaunchError if they have not joined after `timeout`.
    """

    def describe_missing() -> str:
        missing = [str(rank) for rank in range(1, size) if not store.check([f"here/{rank}"])]
        listed = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        return f"{len(missing)} of {size} {noun}s ({listed}, counted from 0)"

    begin, timeout_s = time.monotonic(), timeout.total_seconds()
    is_reported = False
    for rank in range(1, size):
        while not store.check([f"here/{rank}"]):
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                raise LaunchError(
                    f"{describe_missing()} did not connect to {where} within {timeout_s:.0f} s; "
                    "check that they run and that the network lets them connect"
                )
            if waited_s > SLOW_START_S and not is_reported:
                is_reported = True
                print(
                    f"paceline: still waiting for {describe_missing()} to connect to {where}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.05)

"""A process becomes a rank: its device, its threads, its process group."""

import contextlib
import ctypes
import itertools
import math
import os
import platform
import secrets
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.cluster.limits import busy_cores, free_cores, usable_cores
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
    """How long each phase of a start takes."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Call at the end of each phase."""
        now = time.perf_counter()
        self.seconds[phase], self._since = now - self._since, now

    def tell(self, events: Generator[Event]) -> Generator[Event]:
        """Yield these events; the first of them ends the last phase and tells of all."""
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, Started):
                    self.mark("state")
                    event = replace(event, start_s=dict(self.seconds))
                yield event


def choose_device(world: World, wish: str | None) -> torch.device:
    """The accelerator of this local rank, or the CPU. Raises LaunchError when there are too few."""
    if wish == "cpu" or (wish is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"device={wish}, but torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"{world.local_size} ranks on this machine need as many GPUs, got {torch.cuda.device_count()}; "
            f"use --ranks {torch.cuda.device_count()} or --device cpu"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def threads_per_rank(local_size: int, wish: int | None) -> int:
    """Threads of torch on each rank, so that the ranks of a machine do not oversubscribe its cores."""
    return wish or max(1, usable_cores() // local_size)


def count_free_threads(world: World) -> tuple[int, str | None]:
    """Return how many threads of torch each rank should have by what other processes leave free, the same on all ranks, and a sentence
    where they leave less than the share of this training. A collective, in which all ranks stand still for a moment."""
    share = threads_per_rank(world.local_size, None)
    if world.size > 1:
        dist.barrier()  # so that what the ranks themselves do does not count
    busy = busy_cores(BUSY_SAMPLE_S) or 0.0
    free = free_cores(busy) / world.local_size
    here = torch.tensor(
        [-max(1, min(share, math.floor(free + 0.5))), share > free + 0.5, busy], dtype=torch.float64
    )
    if world.size > 1:
        dist.all_reduce(here, dist.ReduceOp.MAX)
    threads, is_short, most = -int(here[0]), bool(here[1]), here[2].item()
    on = "this machine" if world.local_size == world.size else "a node"
    return (
        threads,
        f"{on} is oversubscribed: other processes keep {most:.1f} of {usable_cores()} cores busy"
        if is_short
        else None,
    )


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed. Each step asks for the same again, and the kernel would have to clear it page by page."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def workers_per_rank(local_size: int, device: torch.device, wish: int | None) -> int:
    """Processes that read samples. Without a GPU every core computes already."""
    if wish is not None:
        return wish
    return min(4, max(0, usable_cores() // local_size - 1)) if device.type == "cuda" else 0


BUSY_SAMPLE_S = 0.25  # at the processors, for what other processes take of them
FLIGHT_RECORDER_SIZE = 64  # collectives in torch's flight recorder, for the doctor
START_TIMEOUT_S = (
    600.0  # that ranks wait for one another at least, until all have done once what they will do again
)
SAVE_TIMEOUT_S = 1800.0  # the same, for the slowest of them to write its part of a checkpoint


def start_timeout_s(timeout_s: float) -> float:
    """For how long ranks wait that will wait for so long later on."""
    return max(timeout_s, START_TIMEOUT_S)


@contextlib.contextmanager
def process_group(
    world: World, device: torch.device, timeout_s: float, meeting_place: Path
) -> Iterator[None]:
    """The default process group: one that is there already, or one for the time of this context, with the patience of a start."""
    timeout_s = start_timeout_s(timeout_s)
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_SIZE)
    )  # torch reads it with the first process group
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
    """Raises LaunchError where another rank has the same GPU, with which NCCL would not begin."""
    holder = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if holder != str(rank):
        raise LaunchError(
            f"ranks {holder} and {rank} both have GPU {gpu}; each needs one of its own: let the launcher tell local ranks, "
            "and look at CUDA_VISIBLE_DEVICES"
        )


def set_collective_timeout(timeout_s: float, but: dist.ProcessGroup | None = None) -> None:
    """A rank that waits longer than this for another one in a collective fails, whatever the group of ranks; `but`: that is left as it is.

    A group that was made without saying so has 30 minutes, also where the default group has less (torch 2.13)."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not but:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


_group_numbers = itertools.count()  # process groups that this process has made
_open_stores: dict[
    str, dist.TCPStore
] = {}  # by the address that all ranks of this start were given; several process groups may use it


def _rendezvous(world: World, timeout_s: float, meeting_place: Path) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    if world.size == 1:
        return dist.HashStore()
    if world.launcher == "torchrun":
        store = _store_at(world, timeout, open_here=world.rank == 0 and not world.old_store)
        # The agent keeps its store over restarts and over process groups, and with it the addresses of what is gone (torch 2.13). Agents of
        # several nodes may count restarts apart, but then each has a store of its own.
        return dist.PrefixStore(
            f"paceline/{world.restart if world.old_store else 0}/{next(_group_numbers)}", store
        )
    if world.address is not None:
        return _store_at(world, timeout, open_here=world.rank == 0)
    if world.pmi is not None:
        return _meet_through_pmi(world, world.pmi, timeout)
    return meet_through_file(world, timeout, meeting_place)[0]


def _store_at(world: World, timeout: timedelta, open_here: bool) -> dist.TCPStore:
    """The store at the address that all ranks were given."""
    if world.address is None:
        raise LaunchError(
            f"{world.launcher} has set no MASTER_ADDR and MASTER_PORT, where rank 0 is met; set them, or start with torchrun"
        )
    host, _, port = world.address.rpartition(":")
    if not open_here:
        return dist.TCPStore(host, int(port), world.size, False, timeout)
    if world.address not in _open_stores:
        on = (
            host if world.local_size == world.size and is_local_host(host) else choose_listen_address(host)[0]
        )
        _open_stores[world.address] = open_store(on, int(port), timeout)
    return _open_stores[world.address]


def _open_store(world: World, timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """And where the other ranks find it, for `_join`."""
    on, hosts = (
        (LOOPBACK, [LOOPBACK]) if world.local_size == world.size else choose_listen_address(world.host)
    )
    store = open_store(on, timeout=timeout)
    return store, f"{','.join(hosts)}:{store.port}"


def _join_store(where: str, world: World, timeout: timedelta) -> dist.TCPStore:
    """Raises OSError where nobody answers."""
    hosts, _, port = where.rpartition(":")
    for host in hosts.split(","):
        with contextlib.suppress(OSError, dist.DistNetworkError):
            store = dist.TCPStore(host, int(port), world.size, False, timedelta(seconds=5))
            store.set_timeout(timeout)
            return store
    raise OSError(f"no store at {where}")


def _meet_through_pmi(world: World, fd: int, timeout: timedelta) -> dist.Store:
    """Ranks of MPICH have no name for their start that is the same for all, but can tell one another."""
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
            f"rank {world.rank} on {platform.node()} does not reach rank 0 at {where}"
        ) from None


def meet_through_file(world: World, timeout: timedelta, meeting_place: Path) -> tuple[dist.TCPStore, str]:
    """mpirun and srun agree on no store: rank 0 opens one on a free port and writes where, in a folder that all ranks see. Returns it, and
    a key that the ranks share: nobody else can read that file."""
    note = meeting_place / f".meet-{world.launcher}-{world.job}"
    if world.rank == 0:
        store, where = _open_store(world, timeout)
        key = secrets.token_hex(32)
        meeting_place.mkdir(parents=True, exist_ok=True)
        write_secret(note, f"{where} {key}")
        for rank in range(1, world.size):
            store.wait([f"here/{rank}"], timeout)
        note.unlink()
        return store, key
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            where, key = read_own(note).split()
            store = _join_store(where, world, timeout)
            store.set(f"here/{world.rank}", "")
            return store, key
        time.sleep(0.05)
    raise LaunchError(
        f"rank {world.rank} waited {timeout.total_seconds():.0f} s for rank 0 to write {note}; do all ranks see that folder?"
    )

"""The difference between the clocks of nodes, measured by messages."""

import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.distributed.world import World

EXCHANGES = 16  # of which the quickest counts
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockOffset(NamedTuple):
    """What to add to this rank's clock for that of rank 0, in ns, and the largest error of that."""

    offset_ns: int = 0
    error_ns: int = 0


def measure_clock_offset(world: World) -> ClockOffset:
    """Return the offset of this rank's clock. A collective.

    Ranks of one machine have one clock. The first rank of each other machine exchanges messages with rank 0
    and takes the middle of the quickest exchange for the time of the answer (Cristian, Probabilistic clock
    synchronization, 1989). The error is at most half of that exchange.
    """
    if world.size == 1:
        return ClockOffset()
    machines = gather_objects(read_clock_id(), world.size)
    leaders = [machines.index(machine) for machine in dict.fromkeys(machines) if machine != machines[0]]
    own = ClockOffset()
    for leader in leaders:
        if world.rank == leader:
            own = min((_ask_time() for _ in range(EXCHANGES)), key=lambda offset: offset.error_ns)
        elif world.rank == 0:
            for _ in range(EXCHANGES):
                _answer_time(leader)
    offsets: list[ClockOffset] = gather_objects(own, world.size) if leaders else [own] * world.size
    return offsets[machines.index(machines[world.rank])]


def read_clock_id() -> str:
    """Return a text that two processes share if they read the same clock."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return platform.node()


def _ask_time() -> ClockOffset:
    answer = torch.zeros(1, dtype=torch.int64, device=_message_device())
    began_ns = time.time_ns()
    dist.send(answer, 0)
    dist.recv(answer, 0)
    told_ns = int(answer.item())
    ended_ns = time.time_ns()
    return ClockOffset(told_ns - (began_ns + ended_ns) // 2, (ended_ns - began_ns + 1) // 2)


def _answer_time(rank: int) -> None:
    message = torch.zeros(1, dtype=torch.int64, device=_message_device())
    dist.recv(message, rank)
    message.fill_(time.time_ns())
    dist.send(message, rank)


def _message_device() -> torch.device:
    """Return a device whose tensors the default process group can send; the CPU if possible."""
    devices = [torch.device(device) for device in dist.distributed_c10d._get_default_group()._device_types]
    return next((device for device in devices if device.type == "cpu"), devices[0])


def gather_objects(value: Any, ranks: int) -> list[Any]:
    """Return the values of all ranks. A collective. `ranks`: their number."""
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values

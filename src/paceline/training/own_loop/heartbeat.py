"""The folder in which the ranks of a training loop of the user report their state."""

from __future__ import annotations

import atexit
import contextlib
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.distributed.world import World
from paceline.doctor.heartbeat import OWN_CODE
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import CheckpointError, RunError
from paceline.run import RunFolder
from paceline.training.node_sampler import NodeSampler

TIMEOUT_S = 600.0
_heartbeats = contextlib.ExitStack()
atexit.register(_heartbeats.close)


def create_folder(folder: Path, rank: int, ranks: int) -> None:
    """Create a folder on rank 0. Raises CheckpointError on all ranks if that fails."""

    def create() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot create {folder}: {error.strerror}"
        return ""

    if problem := _call_on_first_rank(create, rank, ranks):
        raise CheckpointError(problem)


def _call_on_first_rank(function: Callable[[], str], rank: int, ranks: int) -> str:
    """Return the result of a function that rank 0 calls. A collective."""
    result = [function() if rank == 0 else ""]
    if ranks > 1:
        dist.broadcast_object_list(result, 0)
    return result[0]


def start_heartbeat(run: RunFolder, world: World, monitor: float | Literal["off"]) -> HeartbeatWriter:
    """Report the state of this rank in a folder, until this process ends or calls `setup` again.

    monitor: seconds between samples of this node in the folder, or "off".

    Raises RunError if another process uses the folder, and CheckpointError if it cannot be created.
    """
    _heartbeats.close()
    create_folder(run.ranks, world.rank, world.size)

    def lock() -> str:
        try:
            _heartbeats.callback(run.lock(wait_s=0.0).close)
        except RunError as error:
            return str(error)
        return ""

    if problem := _call_on_first_rank(lock, world.rank, world.size):
        raise RunError(problem)
    timeout_s = _collective_timeout_s() if world.size > 1 else TIMEOUT_S
    heartbeat = HeartbeatWriter(run, world.rank, world.size, timeout_s, timeout_s)
    _heartbeats.enter_context(heartbeat)
    heartbeat.enter(OWN_CODE)
    sampler = NodeSampler(run, monitor, _find_place(world))
    _heartbeats.callback(_stop, sampler)
    _report(sampler)
    return heartbeat


def _find_place(world: World) -> World:
    """Return the world with the rank's place in its node, which a launcher may not tell. A collective."""
    if world.size == 1:
        return world
    nodes: list[str | None] = [None] * world.size
    dist.all_gather_object(nodes, platform.node())
    node = nodes[world.rank]
    return replace(world, local_rank=nodes[: world.rank].count(node), local_size=nodes.count(node))


def _stop(sampler: NodeSampler) -> None:
    _report(sampler)
    sampler.stop()


def _report(sampler: NodeSampler) -> None:
    """Start the sampler, or print why it ended: a loop of the user has no events."""
    for note in sampler.check():
        print(f"paceline: {note}", file=sys.stderr)


def _collective_timeout_s() -> float:
    """Return how long ranks wait for one another."""
    group: Any = dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return float(group._get_backend(device).options._timeout.total_seconds())

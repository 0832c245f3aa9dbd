"""Nodes of a Ray cluster: a placement group reserves cores, and an actor on each node holds an agent."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import LaunchError
from paceline.launch.ray.launcher import connect, last_line
from paceline.tuning.executors.node_agent import WORDS
from paceline.tuning.executors.remote_node import ProcessConnection, RemoteNode
from paceline.units import several

RESERVE_S = 60.0  # to wait for cores that others use
EXCHANGE_S = 0.05  # between calls of an actor
CLOSE_S = 60.0  # for an agent to end its trials


class AgentActor:
    """An actor that holds the agent of its node."""

    def __init__(self, folder: Path, ranks: int):
        os.chdir(folder)
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # trials are not workers of Ray
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the cores of the actor
        self._connection = ProcessConnection([sys.executable, *WORDS, str(ranks)])

    def exchange(self, lines: list[str]) -> tuple[list[str], str | None]:
        """Send lines, and return those that have arrived, and why the agent ended or None."""
        for line in lines:
            self._connection.send(line)
        is_alive = self._connection.is_alive
        return self._connection.receive(), None if is_alive else self._connection.describe_end()

    def close(self) -> None:
        self._connection.close()


class RayConnection:
    """A connection to an agent through an actor."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._unsent: list[str] = []
        self._answer: Any = None
        self._next_s = 0.0
        self._end: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._end is None

    def send(self, line: str) -> None:
        self._unsent.append(line)

    def receive(self) -> list[str]:
        if self._end is not None:
            return []
        if self._answer is None and (self._unsent or time.monotonic() > self._next_s):
            self._answer, self._unsent = self._actor.exchange.remote(self._unsent), []
            self._next_s = time.monotonic() + EXCHANGE_S
        if self._answer is None or not ray.wait([self._answer], timeout=0)[0]:
            return []
        answer, self._answer = self._answer, None
        try:
            lines, self._end = ray.get(answer)
        except RayError as error:  # the actor was killed, or its node is lost
            lines, self._end = [], last_line(error)
        return lines

    def describe_end(self) -> str:
        return self._end or ""

    def close(self) -> None:
        with contextlib.suppress(RayError, GetTimeoutError):
            if self._unsent:
                ray.get(self._actor.exchange.remote(self._unsent), timeout=CLOSE_S)
            ray.get(self._actor.close.remote(), timeout=CLOSE_S)
        ray.kill(self._actor)


@contextlib.contextmanager
def open_ray_nodes(nodes: int, ranks: int) -> Iterator[list[RemoteNode]]:
    """Yield nodes of the Ray cluster, over which the ranks are spread evenly. Raises LaunchError."""
    with connect():
        kind = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
        _check(kind, nodes, ranks)
        bundle = {"CPU": ranks // nodes} | ({"GPU": ranks // nodes} if kind == "GPU" else {})
        strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
        group = placement_group([bundle] * nodes, strategy=strategy)
        try:
            if not group.wait(RESERVE_S):
                free = int(ray.available_resources().get(kind, 0))
                raise LaunchError(
                    f"--ranks {ranks} on {several(nodes, 'node')} require more of the Ray cluster than was "
                    f"free within {RESERVE_S:.0f} s: {free} {kind}s are free; see ray status for the others"
                )
            yield [
                RemoteNode(f"node {index}", ranks // nodes, RayConnection(_start_actor(group, index, bundle)))
                for index in range(nodes)
            ]
        finally:
            remove_placement_group(group)


def _start_actor(group: Any, index: int, bundle: dict[str, int]) -> Any:
    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }
    return ray.remote(AgentActor).options(**options).remote(Path.cwd(), bundle["CPU"])


def _check(kind: str, nodes: int, ranks: int) -> None:
    """Raise LaunchError if the cluster is too small."""
    available = int(ray.cluster_resources().get(kind, 0))
    if available < ranks:
        raise LaunchError(
            f"--ranks must be at most {available}, the {kind}s of the Ray cluster, got {ranks}; use --ranks "
            f"{available}"
        )
    alive = sum(node["Alive"] for node in ray.nodes())
    if alive < nodes:
        raise LaunchError(
            f"--nodes must be at most {alive}, the nodes of the Ray cluster, got {nodes}; use --nodes {alive}"
        )

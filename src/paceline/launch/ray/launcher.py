"""Start ranks through Ray: room for all of them in a placement group, and in it an actor for each."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import LaunchError
from paceline.files import read_own, reason
from paceline.launch import worker_processes
from paceline.launch.ray.actor import Agent, side_by_side
from paceline.launch.supervise import attend
from paceline.launch.worker_processes import StopRequest
from paceline.run import RunFolder
from paceline.spec import Launch
from paceline.units import several

ROOM_S = 60.0  # to wait for what others use
START_S = 120.0  # for Ray to start actors
ANSWER_S = 3.0
POLL_S = 0.1
CALLS = 3  # of an actor at once: wait, and signals
OBJECTS_BYTES = 80 * 2**20  # in a Ray of our own, the least that it takes: there are none


def start(run: RunFolder, launch: Launch) -> int:
    """Train the request of `run` on ranks that Ray places, showing what happens; returns the exit status.

    Raises LaunchError where there is no room for them, else as `local.start` does.
    """
    with _connected() as host:
        room = _Room(launch)
        return attend(
            run,
            lambda again, begin: worker_processes.launch(run, room.open, launch.restarts, again, begin, host),
            room.end,
        )


@contextlib.contextmanager
def _connected() -> Iterator[str]:
    """To a cluster, or to a Ray of our own for as long as this lasts; gives this machine's address."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    cluster = _cluster()
    folder = (
        tempfile.mkdtemp(prefix="ray-", dir="/tmp") if cluster is None else None
    )  # there are sockets in it: its path must be short
    try:
        _init(cluster, folder)
        yield get_node_ip_address() if cluster is not None else "127.0.0.1"
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _init(cluster: str | None, folder: str | None) -> None:
    own: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": OBJECTS_BYTES, "_temp_dir": folder}
        if folder
        else {}
    )
    try:
        ray.init(
            address=cluster or "local",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
            **own,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        what = f"joined at {cluster}" if cluster else "started here"
        raise LaunchError(f"Ray could not be {what}: {_said(error)}") from error


def _cluster() -> str | None:
    """That of RAY_ADDRESS, else the one that ray start has started here. (ray.init may take one that belongs to another program, and waits
    for minutes where none is left.) Raises LaunchError."""
    asked = os.environ.get("RAY_ADDRESS", "auto")
    if asked == "local":
        return None
    if asked != "auto":
        if "://" in asked:
            raise LaunchError(
                f"RAY_ADDRESS={asked} is for clients outside of a cluster: start paceline on one of its nodes, or by ray job submit"
            )
        if not _answers(asked):
            raise LaunchError(
                f"no Ray cluster answers at RAY_ADDRESS={asked}; unset it to start one on this machine"
            )
        return asked
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster"
    try:
        found = read_own(
            note
        ).strip()  # anybody may write into /tmp, and whoever is there would get what we pickle
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(
            f"cannot read {note}: {reason(error)}; set RAY_ADDRESS to the cluster, or to local"
        ) from error
    return found if _answers(found) else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


@dataclass
class _RayRank:
    """A process on some node of Ray's."""

    agent: Any  # a handle of Agent
    pid: int
    over: ray.ObjectRef
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and ray.wait([self.over], timeout=0)[0]:
            try:
                self.status = ray.get(self.over)
            except RayError:  # the actor was killed, or its node is gone
                self.status = worker_processes.LOST
        return self.status

    def send_signal(self, sig: int) -> None:
        self.agent.send_signal.remote(int(sig))


@dataclass
class _Slot:
    agent: Any
    node: str
    gpus: Sequence[str]  # of all ranks of this node: each takes that of its local rank
    started: list[_RayRank]

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> _RayRank:
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        try:
            rank = _RayRank(
                self.agent,
                ray.get(self.agent.start.remote(run, {**environ, **seen}, log)),
                self.agent.wait.remote(),
            )
        except RayError as error:
            raise LaunchError(f"Ray could not start a rank: {_said(error)}") from error
        self.started.append(rank)
        return rank


class _Room:
    def __init__(self, launch: Launch):
        self._started: list[_RayRank] = []
        self._ranks, self._nodes = launch.ranks or 1, launch.nodes
        gpus = launch.device == "cuda" or (launch.device is None and "GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"

    @contextlib.contextmanager
    def open(self, attempt: int, asked: StopRequest) -> Iterator[Sequence[_Slot]]:
        """Raises LaunchError where the cluster has not enough, or others keep it."""
        self._check()
        each = self._ranks // self._nodes if self._nodes > 1 else 1
        bundle = {"CPU": each} | ({"GPU": each} if self._kind == "GPU" else {})
        group = placement_group(
            [bundle] * (self._ranks // each), strategy="STRICT_SPREAD" if self._nodes > 1 else "PACK"
        )
        agents: list[Any] = []
        try:
            self._wait(group, asked)
            for at in range(self._ranks):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at // each)
                own = {"num_cpus": 1, "num_gpus": 1 if self._kind == "GPU" else 0, "max_concurrency": CALLS}
                agents.append(ray.remote(Agent).options(scheduling_strategy=place, **own).remote())
            try:
                given = ray.get([agent.where.remote(Path.cwd()) for agent in agents], timeout=START_S)
            except (RayError, GetTimeoutError) as error:
                raise LaunchError(f"Ray could not start ranks: {_said(error)}") from error
            self._started = []
            here = ray.get_runtime_context().get_node_id()
            yield [
                _Slot(agents[at], given[at].node, gpus, self._started)
                for at, gpus in side_by_side(given, here)
            ]
        finally:
            for agent in agents:
                ray.kill(agent)
            remove_placement_group(group)

    def _check(self) -> None:
        has = int(ray.cluster_resources().get(self._kind, 0))
        if has < self._ranks:
            others = " or --device cpu" if self._kind == "GPU" else ""
            raise LaunchError(
                f"--ranks {self._ranks} take as many {self._kind}s of the Ray cluster, and it has {has}: use --ranks {has}{others}"
            )
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive < self._nodes:
            raise LaunchError(f"--nodes {self._nodes}, but the Ray cluster has {alive}: use --nodes {alive}")

    def _wait(self, group: PlacementGroup, asked: StopRequest) -> None:
        deadline = time.monotonic() + ROOM_S
        while not group.wait(POLL_S):
            asked.heed()
            self._check()  # a node may have been lost meanwhile
            if time.monotonic() > deadline:
                free = int(ray.available_resources().get(self._kind, 0))
                raise LaunchError(
                    f"--ranks {self._ranks} on {several(self._nodes, 'node')} found no room in the Ray cluster "
                    f"for {ROOM_S:.0f} s: {free} {self._kind}s are free; ray status tells who has the others"
                )

    def end(self, only: Container[int] | None) -> list[int]:
        """As `local` does it with its own processes."""
        ended = [rank for rank in self._started if rank.poll() is None and (only is None or rank.pid in only)]
        for rank in ended:
            rank.send_signal(signal.SIGKILL)
        return [rank.pid for rank in ended]


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

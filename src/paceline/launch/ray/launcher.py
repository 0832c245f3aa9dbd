"""Start ranks through Ray: a placement group reserves resources, and each rank has an actor in it."""

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
from paceline.launch.ray.actor import Agent, order_by_node
from paceline.launch.supervise import supervise
from paceline.launch.worker_processes import StopRequest
from paceline.run import RunFolder
from paceline.spec import Launch
from paceline.units import several

RESERVE_S = 60.0  # to wait for resources that others use
START_S = 120.0  # for Ray to start actors
ANSWER_S = 3.0
POLL_S = 0.1
CALLS = 3  # concurrent calls of an actor: wait, and signals
OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray accepts; Paceline stores no objects


def start(run: RunFolder, launch: Launch) -> int:
    """Train the request of `run` on ranks that Ray places, show the progress, and return the exit status.

    Raises LaunchError if the cluster has too few resources, and the errors of `local.start`.
    """
    with connect() as host:
        reservation = _Reservation(launch)
        return supervise(
            run,
            lambda on_restart, on_start: worker_processes.launch(
                run, reservation.open, launch.restarts, on_restart, on_start, host
            ),
            reservation.kill,
        )


@contextlib.contextmanager
def connect() -> Iterator[str]:
    """Connect to a Ray cluster, or start one until the context ends. Yield the address of this machine."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    cluster = _find_cluster()
    # sockets lie in this folder, so its path must be short
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp") if cluster is None else None
    try:
        _init(cluster, folder)
        yield get_node_ip_address() if cluster is not None else "127.0.0.1"
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _init(cluster: str | None, folder: str | None) -> None:
    options: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": folder}
        if folder
        else {}
    )
    try:
        ray.init(
            address=cluster or "local",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
            **options,
        )
    except Exception as error:  # ray 2.60: a node that does not start in time raises Exception itself
        failure = (
            f"Ray could not be joined at {cluster}" if cluster else "Ray could not be started on this machine"
        )
        raise LaunchError(f"{failure}: {last_line(error)}") from error


def _find_cluster() -> str | None:
    """Return the address of RAY_ADDRESS, else of the cluster that `ray start` started here, else None.

    ray.init may join a cluster of another program, and waits for minutes if no cluster is left. Raises
    LaunchError.
    """
    requested = os.environ.get("RAY_ADDRESS", "auto")
    if requested == "local":
        return None
    if requested != "auto":
        if "://" in requested:
            raise LaunchError(
                f"RAY_ADDRESS={requested} is an address for clients outside of the cluster; start paceline "
                "on a node of the cluster, or with ray job submit"
            )
        if not _answers(requested):
            raise LaunchError(
                f"no Ray cluster answers at RAY_ADDRESS={requested}; unset it to start one on this machine"
            )
        return requested
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster"
    try:
        # any user may write into /tmp, and the process at that address would receive what is pickled here
        address = read_own(note).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(
            f"cannot read {note}: {reason(error)}; set RAY_ADDRESS to the cluster, or to local"
        ) from error
    return address if _answers(address) else None


def _answers(address: str) -> bool:
    """Return whether a process accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


@dataclass
class _RayRank:
    """A rank as a process on a node of the Ray cluster."""

    agent: Any  # handle of an Agent
    pid: int
    end: ray.ObjectRef
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and ray.wait([self.end], timeout=0)[0]:
            try:
                self.status = ray.get(self.end)
            except RayError:  # the actor was killed, or its node is lost
                self.status = worker_processes.LOST
        return self.status

    def send_signal(self, sig: int) -> None:
        self.agent.send_signal.remote(int(sig))


@dataclass
class _Slot:
    """A place where Ray starts a rank."""

    agent: Any
    node: str
    gpus: Sequence[str]  # of all ranks of this node; each rank uses that of its local rank
    started: list[_RayRank]

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> _RayRank:
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        try:
            rank = _RayRank(
                self.agent,
                ray.get(self.agent.start.remote(run, {**environ, **visible}, log)),
                self.agent.wait.remote(),
            )
        except RayError as error:
            raise LaunchError(f"Ray could not start a rank: {last_line(error)}") from error
        self.started.append(rank)
        return rank


class _Reservation:
    """Resources of the Ray cluster for all ranks."""

    def __init__(self, launch: Launch):
        self._started: list[_RayRank] = []
        self._ranks, self._nodes = launch.ranks or 1, launch.nodes
        gpus = launch.device == "cuda" or (launch.device is None and "GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"

    @contextlib.contextmanager
    def open(self, attempt: int, stop: StopRequest) -> Iterator[Sequence[_Slot]]:
        """Yield a slot for each rank.

        Raises LaunchError if the cluster has too few resources, or others use them.
        """
        self._check()
        per_bundle = self._ranks // self._nodes if self._nodes > 1 else 1
        bundle = {"CPU": per_bundle} | ({"GPU": per_bundle} if self._kind == "GPU" else {})
        group = placement_group(
            [bundle] * (self._ranks // per_bundle), strategy="STRICT_SPREAD" if self._nodes > 1 else "PACK"
        )
        agents: list[Any] = []
        try:
            self._wait(group, stop)
            for rank in range(self._ranks):
                place = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank // per_bundle
                )
                options = {
                    "num_cpus": 1,
                    "num_gpus": 1 if self._kind == "GPU" else 0,
                    "max_concurrency": CALLS,
                }
                agents.append(ray.remote(Agent).options(scheduling_strategy=place, **options).remote())
            try:
                placements = ray.get([agent.place.remote(Path.cwd()) for agent in agents], timeout=START_S)
            except (RayError, GetTimeoutError) as error:
                raise LaunchError(f"Ray could not start ranks: {last_line(error)}") from error
            self._started = []
            first_node = ray.get_runtime_context().get_node_id()
            yield [
                _Slot(agents[index], placements[index].node, gpus, self._started)
                for index, gpus in order_by_node(placements, first_node)
            ]
        finally:
            for agent in agents:
                ray.kill(agent)
            remove_placement_group(group)

    def _check(self) -> None:
        available = int(ray.cluster_resources().get(self._kind, 0))
        if available < self._ranks:
            alternative = " or --device cpu" if self._kind == "GPU" else ""
            raise LaunchError(
                f"--ranks must be at most {available}, the {self._kind}s of the Ray cluster, got "
                f"{self._ranks}; use --ranks {available}{alternative}"
            )
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive < self._nodes:
            raise LaunchError(
                f"--nodes must be at most {alive}, the nodes of the Ray cluster, got {self._nodes}; "
                f"use --nodes {alive}"
            )

    def _wait(self, group: PlacementGroup, stop: StopRequest) -> None:
        deadline = time.monotonic() + RESERVE_S
        while not group.wait(POLL_S):
            stop.check()
            self._check()  # a node may be lost in the meantime
            if time.monotonic() > deadline:
                free = int(ray.available_resources().get(self._kind, 0))
                raise LaunchError(
                    f"--ranks {self._ranks} on {several(self._nodes, 'node')} require more of the Ray "
                    "cluster than was free "
                    f"within {RESERVE_S:.0f} s: {free} {self._kind}s are free; see ray status for the others"
                )

    def kill(self, only: Container[int] | None) -> list[int]:
        """Kill the ranks, restricted to the process ids `only`, and return their ids."""
        running = [
            rank for rank in self._started if rank.poll() is None and (only is None or rank.pid in only)
        ]
        for rank in running:
            rank.send_signal(signal.SIGKILL)
        return [rank.pid for rank in running]


def last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

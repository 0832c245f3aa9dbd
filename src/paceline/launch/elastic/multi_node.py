"""Start ranks on several nodes through an elastic agent on each of them.

If nodes are lost, the others continue.
"""

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from paceline.distributed.network_interface import find_local_address
from paceline.distributed.process_group import meet_through_file
from paceline.distributed.world import World
from paceline.errors import LaunchError, RankError
from paceline.launch.elastic.agent import run_agent
from paceline.launch.elastic.rendezvous import BACKEND, SealedBackend, build_run_id
from paceline.launch.elastic.restarts import RestartLog
from paceline.launch.supervise import (
    FAILED,
    EndedElsewhereError,
    OnStart,
    RankLogs,
    kill_children,
    supervise,
)
from paceline.launch.worker_processes import OnRestart
from paceline.run import RunFolder

TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
RENDEZVOUS_S = 60.0  # for all agents to connect
KEEP_ALIVE_S, MAX_MISSED = 2, 3  # an agent sends a sign every 2 s; it is lost after 3 missing signs
LOST_S = 20.0  # without an answer of the store, after which a node ends
LAST_CALL_S = 5  # for nodes beyond the least number to join a new start


def start(run: RunFolder, me: World, ranks_per_node: int, least: int, restarts: int, timeout_s: float) -> int:
    """Train the request of `run` as the agent of this node, and return the exit status.

    The first agent shows the progress.

    me: the position of this agent among the agents.
    least: the least number of nodes with which to restart.
    restarts: maximum number of restarts of all ranks, from the last complete checkpoint, after a rank or node
        fails.
    Raises the Error that ended the training, or RankError for a lost rank or node.
    """
    run.ranks.mkdir(exist_ok=True)
    is_reporter = me.rank == 0
    store, key = _connect_agents(run, me)
    restart_log = RestartLog(run, is_reporter)
    for name in TASK_VARIABLES:  # the ranks are not tasks of Slurm
        os.environ.pop(name, None)
    # torch 2.13: otherwise ranks of a new start find the keys of the previous start
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    address, run_id = _find_address(me, store), build_run_id(run.path.name, key)
    parameters = RendezvousParameters(
        backend=BACKEND,
        endpoint="",
        run_id=run_id,
        min_nodes=least,
        max_nodes=me.size,
        local_addr=address,
        # ranks of other nodes may wait for timeout_s until they fail
        join_timeout=round(timeout_s) + LAST_CALL_S,
        last_call_timeout=LAST_CALL_S,
        keep_alive_interval=KEEP_ALIVE_S,
        keep_alive_max_attempt=MAX_MISSED,
    )
    rendezvous = _LoggedRendezvous(
        create_handler(store, SealedBackend(store, run_id, key), parameters), restart_log.begin
    )
    logs = RankLogs(run, lambda: restart_log.count - 1)
    if not is_reporter:
        threading.Thread(target=_exit_when_disconnected, args=(me, store), daemon=True).start()

    def launch(on_restart: OnRestart, on_start: OnStart) -> None:
        try:
            run_agent(run, ranks_per_node, restarts, rendezvous, logs, on_restart, on_start, address)
        except RendezvousClosedError:
            raise EndedElsewhereError from None

    try:
        return supervise(run, launch, is_reporter=is_reporter, logs_restarts=False)
    except RendezvousTimeoutError:
        if not is_reporter:
            return FAILED
        raise restart_log.too_few_nodes(least) from None
    except (RendezvousConnectionError, dist.DistError) as error:
        raise RankError(
            f"node {platform.node()} lost the connection to node {me.host}, where the agents meet; "
            f"{run.hint()}"
        ) from error
    except RendezvousError as error:
        raise RankError(
            f"node {platform.node()} cannot join the other nodes: {error}; {run.hint()}"
        ) from error


def _connect_agents(run: RunFolder, me: World) -> tuple[dist.TCPStore, str]:
    """Return a store on the first agent to which all agents are connected, and a secret key of this step."""
    timeout = timedelta(seconds=RENDEZVOUS_S)
    try:
        store, key = meet_through_file(me, timeout, run.path)
        if me.rank == 0:
            store.set("all here", "")
        store.wait(["all here"], timeout)
        store.set_timeout(timedelta(seconds=LOST_S))
    except dist.DistError as error:
        raise LaunchError(
            f"not all of {me.size} nodes were connected after {RENDEZVOUS_S:.0f} s; "
            "check that all nodes can reach the first"
        ) from error
    return store, key


def _exit_when_disconnected(me: World, store: dist.TCPStore) -> None:
    """End this agent when it cannot reach the store. torch 2.13 would wait 15 minutes after a link is cut."""
    last_contact = time.monotonic()
    while time.monotonic() < last_contact + LOST_S:
        time.sleep(KEEP_ALIVE_S)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((store.host, store.port), timeout=KEEP_ALIVE_S),
        ):
            last_contact = time.monotonic()
    kill_children()
    print(
        f"paceline: node {platform.node()} ends: it could not reach node {me.host}, where the agents meet, "
        f"for {LOST_S:.0f} s",
        file=sys.stderr,
    )
    os._exit(FAILED)


def _find_address(me: World, store: dist.TCPStore) -> str:
    """Return the address of this node, as seen from the node of the store."""
    if me.rank == 0 and me.host is not None:
        return me.host
    return find_local_address(store.host, store.port)


class _LoggedRendezvous(RendezvousHandler):
    """A rendezvous of torch that calls `begin` with the names of the nodes at each start."""

    def __init__(self, inner: RendezvousHandler, begin: Callable[[Sequence[str]], None]):
        self._inner, self._begin = inner, begin

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        info.store.set(f"name/{info.rank}", platform.node())
        self._begin([info.store.get(f"name/{rank}").decode() for rank in range(info.world_size)])
        return info

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()

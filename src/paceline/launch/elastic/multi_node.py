"""Start ranks on several nodes through an elastic agent on each of them.

If nodes are lost, the others continue. Other nodes may join while fewer than the maximum number work.
"""

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from dataclasses import replace
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
from paceline.distributed.process_group import (
    START_TIMEOUT_S,
    join_through_file,
    meet_through_file,
    name_note,
)
from paceline.distributed.world import World
from paceline.errors import LaunchError, RankError
from paceline.launch.elastic.agent import LeftOutError, Membership, run_agent
from paceline.launch.elastic.regroup import Regroup
from paceline.launch.elastic.rendezvous import BACKEND, SealedBackend, build_run_id
from paceline.launch.elastic.restarts import RestartLog
from paceline.launch.signals import STOPPED
from paceline.launch.slurm.joining import JoiningJobs
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
from paceline.spec import Launch

TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
KEEP_ALIVE_S, MAX_MISSED = 2, 3  # an agent sends a sign every 2 s; it is lost after 3 missing signs
LOST_S = 20.0  # without an answer of the store, after which a node ends
LAST_CALL_S = 5  # for nodes beyond the least number to join a new start
WAITING_S = 10**9  # for a node that joins, until the training has saved its next checkpoint


def start(run: RunFolder, me: World, launch: Launch, timeout_s: float) -> int:
    """Train the request of `run` as the agent of this node, and return the exit status.

    The first agent shows the progress. If `launch` allows fewer nodes than its maximum, other nodes may join.

    me: the position of this agent among the agents.
    Raises the Error that ended the training, or RankError for a lost rank or node.
    """
    may_grow = launch.can_grow
    store, key = _connect_agents(run, me, may_grow)
    is_reporter = me.rank == 0
    jobs = JoiningJobs(run, name_note(me), launch.nodes) if is_reporter and may_grow else None
    try:
        return _run(run, me, launch, timeout_s, store, key, jobs)
    finally:
        if jobs is not None:
            jobs.cancel()
            (run.path / name_note(me)).unlink(missing_ok=True)


def join(run: RunFolder, me: World, launch: Launch, timeout_s: float, note: str) -> int:
    """Join a running training as the agent of one more node, and return the exit status.

    note: the name of the file in the run folder that says where the agents of the training meet.
    """
    found = join_through_file(me, timedelta(seconds=LOST_S), run.path, note)
    if found is None:
        print(f"the training of {run.path} that this node would join has ended")
        return 0
    joined = replace(me, rank=launch.nodes, size=launch.nodes + 1, host=found[0].host)
    status = _run(run, joined, launch, timeout_s, *found, None, has_joined=True)
    return 0 if status == STOPPED else status  # only the job of the training is queued again


def _run(
    run: RunFolder,
    me: World,
    launch: Launch,
    timeout_s: float,
    store: dist.TCPStore,
    key: str,
    jobs: JoiningJobs | None,
    has_joined: bool = False,
) -> int:
    """Start and restart the ranks of this node, and return the exit status.

    jobs: queues jobs for lost nodes. has_joined: whether this node joins a running training.
    """
    assert launch.ranks is not None
    least = launch.least_nodes or launch.nodes
    run.ranks.mkdir(exist_ok=True)
    is_reporter = me.rank == 0
    restart_log, regroup = RestartLog(run, is_reporter), Regroup(run, is_reporter)
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
        max_nodes=launch.nodes if launch.can_grow else me.size,
        local_addr=address,
        # ranks of other nodes may wait for timeout_s until they fail
        join_timeout=WAITING_S if has_joined else round(timeout_s) + LAST_CALL_S,
        last_call_timeout=LAST_CALL_S,
        keep_alive_interval=KEEP_ALIVE_S,
        keep_alive_max_attempt=MAX_MISSED,
    )
    rendezvous = _LoggedRendezvous(
        create_handler(store, SealedBackend(store, run_id, key), parameters), restart_log, regroup, jobs
    )
    logs = RankLogs(run, lambda: restart_log.count - 1)
    if not is_reporter:
        threading.Thread(target=_exit_when_disconnected, args=(me, store), daemon=True).start()

    ranks = launch.ranks // launch.nodes

    def start_ranks(on_restart: OnRestart, on_start: OnStart) -> None:
        try:
            run_agent(
                run,
                ranks,
                launch.restarts,
                rendezvous,
                logs,
                on_restart,
                on_start,
                address,
                Membership(
                    regroup, lambda: not is_reporter and restart_log.is_left_out(least), has_joined, timeout_s
                ),
            )
        except RendezvousClosedError:
            raise EndedElsewhereError from None

    try:
        return supervise(run, start_ranks, is_reporter=is_reporter, logs_restarts=False)
    except LeftOutError:
        print(f"paceline: node {platform.node()} is left out: it corrupted data", file=sys.stderr)
        return 0  # the training continues
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


def _connect_agents(run: RunFolder, me: World, may_grow: bool) -> tuple[dist.TCPStore, str]:
    """Return a store on the first agent to which all agents are connected, and a secret key of this step."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        store, key = meet_through_file(me, timeout, run.path, may_grow, "node")
        if me.rank == 0:
            store.set("all here", "")
        store.wait(["all here"], timeout)
        store.set_timeout(timedelta(seconds=LOST_S))
    except dist.DistError as error:
        raise LaunchError(
            f"not all of {me.size} nodes were connected after {START_TIMEOUT_S:.0f} s; "
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
    """A rendezvous of torch that logs the nodes of each start, and queues jobs for nodes that are missing."""

    def __init__(self, inner: RendezvousHandler, log: RestartLog, regroup: Regroup, jobs: JoiningJobs | None):
        self._inner, self._log, self._regroup, self._jobs = inner, log, regroup, jobs

    def next_rendezvous(self) -> RendezvousInfo:
        is_regrouped = self._log.count > 0 and self._regroup.is_due()
        info = self._inner.next_rendezvous()
        info.store.set(f"name/{info.rank}", platform.node())
        names = [info.store.get(f"name/{rank}").decode() for rank in range(info.world_size)]
        self._log.begin(names, is_regrouped)
        self._log.count = self._agree_on_count(info.store)
        self._regroup.begin(info.store)
        if self._jobs is not None:
            self._jobs.replace_missing(names)
        return info

    def _agree_on_count(self, store: dist.Store) -> int:
        """Return the number of starts that the reporter counts; a node that joined has seen fewer."""
        if self._log.is_reporter:
            store.set("count", str(self._log.count))
        return int(store.get("count"))

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
        """Return 0 until the ranks may restart with the nodes that wait."""
        return 1 if self._regroup.poll(self._inner.num_nodes_waiting()) else 0

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()

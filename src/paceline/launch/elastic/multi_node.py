"""Start ranks on several nodes through an elastic agent on each of them, and again on those that are left when some are lost."""

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
from paceline.launch.elastic.rendezvous import BACKEND, SealedBackend, run_id
from paceline.launch.elastic.restarts import RestartLog
from paceline.launch.supervise import FAILED, Begin, EndedElsewhereError, RankLogs, attend, end_children
from paceline.launch.worker_processes import Again
from paceline.run import RunFolder

OF_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
MEETING_S = 60.0  # for all agents to be there
SIGN_S, SIGNS = 2, 3  # an agent shows a sign so often; after so many that are missing it is gone
LOST_S = 20.0  # without an answer, until a node gives the store up
LAST_CALL_S = 5  # for more nodes than the least to come to a new start


def start(run: RunFolder, me: World, ranks_per_node: int, least: int, restarts: int, timeout_s: float) -> int:
    """Train the request of `run` as the agent of this node, `me` among the agents; the first of them shows what happens.
    Returns the exit status.

    Ranks that die are started again with all others, from the last good checkpoint, up to `restarts` times, on `least` nodes or more.
    Raises the Error that ended the training, RankError for a rank or a node that was lost."""
    run.ranks.mkdir(exist_ok=True)
    speaks = me.rank == 0
    store, key = _meet(run, me)
    rounds = RestartLog(run, speaks)
    for name in OF_TASK:  # the ranks are none of Slurm's tasks
        os.environ.pop(name, None)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # else ranks of a new start find the keys of the last one (torch 2.13)
    )

    address, meeting_id = _address(me, store), run_id(run.path.name, key)
    parameters = RendezvousParameters(
        backend=BACKEND,
        endpoint="",
        run_id=meeting_id,
        min_nodes=least,
        max_nodes=me.size,
        local_addr=address,
        join_timeout=round(timeout_s)
        + LAST_CALL_S,  # ranks of other nodes may have to wait for so long until they fail
        last_call_timeout=LAST_CALL_S,
        keep_alive_interval=SIGN_S,
        keep_alive_max_attempt=SIGNS,
    )
    meeting = _Counted(create_handler(store, SealedBackend(store, meeting_id, key), parameters), rounds.begin)
    logs = RankLogs(run, lambda: rounds.count - 1)
    if not speaks:
        threading.Thread(target=_leave_when_cut, args=(me, store), daemon=True).start()

    def launch(again: Again, begin: Begin) -> None:
        try:
            run_agent(run, ranks_per_node, restarts, meeting, logs, again, begin, address)
        except RendezvousClosedError:
            raise EndedElsewhereError from None

    try:
        return attend(run, launch, speaks=speaks, rounds=True)
    except RendezvousTimeoutError:
        if not speaks:
            return FAILED
        raise rounds.too_few(least) from None
    except (RendezvousConnectionError, dist.DistError) as error:
        raise RankError(
            f"node {platform.node()} has lost node {me.host}, where the agents meet; {run.hint()}"
        ) from error
    except RendezvousError as error:
        raise RankError(f"node {platform.node()} cannot meet the others: {error}; {run.hint()}") from error


def _meet(run: RunFolder, me: World) -> tuple[dist.TCPStore, str]:
    """All agents of this step, at a store of the first one, and with a key of theirs."""
    timeout = timedelta(seconds=MEETING_S)
    try:
        store, key = meet_through_file(me, timeout, run.path)
        if me.rank == 0:
            store.set("all here", "")
        store.wait(["all here"], timeout)
        store.set_timeout(timedelta(seconds=LOST_S))
    except dist.DistError as error:
        raise LaunchError(f"not all of {me.size} nodes were there after {MEETING_S:.0f} s") from error
    return store, key


def _leave_when_cut(me: World, store: dist.TCPStore) -> None:
    """torch's client waits for the store without end, and with it the agent (2.13): where a link is cut, for a quarter of an hour."""
    heard = time.monotonic()
    while time.monotonic() < heard + LOST_S:
        time.sleep(SIGN_S)
        with contextlib.suppress(OSError), socket.create_connection((store.host, store.port), timeout=SIGN_S):
            heard = time.monotonic()
    end_children()
    here = platform.node()
    print(
        f"paceline: node {here} ends: for {LOST_S:.0f} s it could not reach node {me.host}, where the agents meet",
        file=sys.stderr,
    )
    os._exit(FAILED)


def _address(me: World, store: dist.TCPStore) -> str:
    """Of this node, as seen from the one where the agents meet."""
    if me.rank == 0 and me.host is not None:
        return me.host
    return find_local_address(store.host, store.port)


class _Counted(RendezvousHandler):
    """torch's, which tells at each new start the names of the nodes that are there."""

    def __init__(self, inner: RendezvousHandler, begin: Callable[[Sequence[str]], None]):
        self._inner, self._begin = inner, begin

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._inner.next_rendezvous()
        found.store.set(f"name/{found.rank}", platform.node())
        self._begin([found.store.get(f"name/{rank}").decode() for rank in range(found.world_size)])
        return found

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

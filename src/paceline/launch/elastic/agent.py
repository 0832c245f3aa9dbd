"""torch's elastic agent: starts and restarts the ranks of a machine, and reports why it restarts them."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from paceline.launch.elastic.regroup import Regroup
from paceline.launch.signals import list_stop_signals
from paceline.launch.spawn import UNFINISHED, build_rank_arguments
from paceline.launch.worker_processes import OnRestart
from paceline.run import RunFolder

POLL_S = 0.1


class LeftOutError(Exception):
    """This node corrupted data, and the others restart without it."""


class Membership(NamedTuple):
    """When the ranks of this agent restart because nodes join or leave."""

    regroup: Regroup
    is_left_out: Callable[[], bool]  # whether the others restart without this node after a failure
    has_joined: bool  # whether this node joined a running training, so that the others continue without it
    saving_s: float  # for the ranks to save before they restart


class _Agent(LocalElasticAgent):
    """An agent that reports restarts.

    on_restart: called with the failed ranks of this machine before all ranks restart.
    on_start: called before each start, when no rank of the previous start is left.
    """

    def __init__(
        self,
        run: RunFolder,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        on_restart: OnRestart,
        on_start: Callable[[], None],
        membership: Membership,
    ):
        super().__init__(spec, logs_specs)
        self._run, self._on_restart, self._on_start = run, on_restart, on_start
        self._membership = membership
        self._failures: dict[int, ProcessFailure] = {}

    def _invoke_run(self, role: str = "default") -> Any:
        try:
            return super()._invoke_run(role)
        except SignalException:
            if self._membership.has_joined:
                with contextlib.suppress(dist.DistError):  # the training has ended
                    self._membership.regroup.request()
            raise

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED and self._membership.regroup.is_due():
            # ranks that another agent stopped are done: `_invoke_run` restarts them with the others
            self._failures = {}
            return RunResult(WorkerState.HEALTHY)
        if unfinished := self._find_unfinished(worker_group):
            result = RunResult(WorkerState.FAILED, failures={**result.failures, **unfinished})
        self._failures = result.failures
        return result

    def _find_unfinished(self, worker_group: Any) -> dict[int, ProcessFailure]:
        """Return ranks that exited with 0 before the training was over. torch counts them as successful."""
        assert isinstance(self._pcontext, SubprocessContext)
        unfinished = {}
        for worker in worker_group.workers:
            process = self._pcontext.subprocess_handlers[worker.local_rank].proc
            if process.poll() == 0 and self._run.unfinished(worker.global_rank).exists():
                unfinished[worker.global_rank] = ProcessFailure(
                    worker.local_rank, process.pid, UNFINISHED, os.devnull
                )
        return unfinished

    def _restart_workers(self, worker_group: Any) -> None:
        if self._failures:
            if self._membership.is_left_out():
                raise LeftOutError
            self._on_restart(self._failures)
        else:
            self._stop_saved()
        super()._restart_workers(worker_group)

    def _stop_saved(self) -> None:
        """Ask the ranks to save and end, and wait for it. torch would kill them after 30 s."""
        assert isinstance(self._pcontext, SubprocessContext)
        processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + self._membership.saving_s
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(POLL_S)

    def _start_workers(self, worker_group: Any) -> Any:
        self._on_start()
        return super()._start_workers(worker_group)


def run_agent(
    run: RunFolder,
    ranks: int,
    restarts: int,
    rendezvous: RendezvousHandler,
    logs_specs: LogsSpecs,
    on_restart: OnRestart,
    on_start: Callable[[], None],
    address: str,
    membership: Membership,
) -> None:
    """Start the ranks of this machine and return when they are done.

    address: the address of this machine for the others.
    Raises ChildFailedError if ranks fail after the last restart, and SignalException if a stop was requested.
    torch's `launch_agent` does the same, but does not report restarts.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in list_stop_signals())
    spec = WorkerSpec(
        role="default",
        local_world_size=ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=tuple(build_rank_arguments(run.path)),
        max_restarts=restarts,
        local_addr=address,
    )
    is_over = True
    try:
        result = _Agent(run, spec, logs_specs, on_restart, on_start, membership).run()
    except (SignalException, LeftOutError):
        is_over = False  # other nodes continue, unless they are asked to stop
        raise
    finally:
        if is_over:
            rendezvous.shutdown()
    if result.is_failed():
        raise ChildFailedError("paceline", result.failures)

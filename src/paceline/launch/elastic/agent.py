"""torch's elastic agent: starts and restarts the ranks of a machine, and reports why it restarts them."""

import os
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from paceline.launch.signals import list_stop_signals
from paceline.launch.spawn import UNFINISHED, build_rank_arguments
from paceline.launch.worker_processes import OnRestart
from paceline.run import RunFolder


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
    ):
        super().__init__(spec, logs_specs)
        self._run, self._on_restart, self._on_start = run, on_restart, on_start
        self._failures: dict[int, ProcessFailure] = {}

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
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
            self._on_restart(self._failures)
        super()._restart_workers(worker_group)

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
        result = _Agent(run, spec, logs_specs, on_restart, on_start).run()
    except SignalException:
        is_over = False  # other nodes continue until they are asked to stop
        raise
    finally:
        if is_over:
            rendezvous.shutdown()
    if result.is_failed():
        raise ChildFailedError("paceline", result.failures)

"""torch's elastic agent: starts the ranks of a machine, and starts them again when one has failed, of which it says why."""

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

from paceline.launch.signals import stop_signals
from paceline.launch.spawn import UNFINISHED, rank_words
from paceline.launch.worker_processes import Again
from paceline.run import RunFolder


class _Agent(LocalElasticAgent):
    """`again` is called with the ranks of this machine that failed, before all are started again; `begin` before each start, when no rank
    of the last one is left."""

    def __init__(
        self, run: RunFolder, spec: WorkerSpec, logs_specs: LogsSpecs, again: Again, begin: Callable[[], None]
    ):
        super().__init__(spec, logs_specs)
        self._run, self._again, self._begin = run, again, begin
        self._failures: dict[int, ProcessFailure] = {}

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if unfinished := self._unfinished(worker_group):
            result = RunResult(WorkerState.FAILED, failures={**result.failures, **unfinished})
        self._failures = result.failures
        return result

    def _unfinished(self, worker_group: Any) -> dict[int, ProcessFailure]:
        """The ranks that exited with 0 before the training was over: for torch they have succeeded."""
        assert isinstance(self._pcontext, SubprocessContext)
        found = {}
        for worker in worker_group.workers:
            process = self._pcontext.subprocess_handlers[worker.local_rank].proc
            if process.poll() == 0 and self._run.unfinished(worker.global_rank).exists():
                found[worker.global_rank] = ProcessFailure(
                    worker.local_rank, process.pid, UNFINISHED, os.devnull
                )
        return found

    def _restart_workers(self, worker_group: Any) -> None:
        if self._failures:
            self._again(self._failures)
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: Any) -> Any:
        self._begin()
        return super()._start_workers(worker_group)


def run_agent(
    run: RunFolder,
    ranks: int,
    restarts: int,
    meeting: RendezvousHandler,
    logs_specs: LogsSpecs,
    again: Again,
    begin: Callable[[], None],
    address: str,
) -> None:
    """Returns when the ranks of this machine are done. `address`: of this machine, as others see it.

    Raises ChildFailedError for ranks that failed after so many restarts, SignalException where it was asked to stop. (torch's
    `launch_agent` does as much, but would not say that it starts them again.)
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in stop_signals())
    spec = WorkerSpec(
        role="default",
        local_world_size=ranks,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        args=tuple(rank_words(run.path)),
        max_restarts=restarts,
        local_addr=address,
    )
    is_over = True
    try:
        result = _Agent(run, spec, logs_specs, again, begin).run()
    except SignalException:
        is_over = False  # elsewhere it goes on, until it is asked to stop there
        raise
    finally:
        if is_over:
            meeting.shutdown()
    if result.is_failed():
        raise ChildFailedError("paceline", result.failures)

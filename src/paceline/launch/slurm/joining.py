"""Jobs of one node each, which join a running training in place of nodes that it lost."""

import contextlib
import os
import threading
from collections.abc import Container, Sequence

from paceline import events
from paceline.distributed.hostlist import expand_hosts
from paceline.errors import LaunchError, RunError
from paceline.events import Noted, Started, Step
from paceline.launch.slurm import client
from paceline.run import RunFolder
from paceline.training.guard.suspects import read_suspects
from paceline.units import several


class JoiningJobs:
    """Queues the job script of a run once for each missing node. Only for a run that was submitted.

    note: the name of the file by which a node finds the training.
    nodes: the maximum number of nodes.
    """

    def __init__(self, run: RunFolder, note: str, nodes: int):
        self._run, self._note, self._nodes = run, note, nodes
        self._queued: list[str] = []
        self._lock = threading.Lock()
        self._is_over = False
        self._job = self._find_job()

    def replace_missing(self, names: Sequence[str]) -> None:
        """Queue jobs for nodes that are missing. `names` are the nodes that work. Returns at once."""
        missing = self._nodes - len(names)
        if missing > 0 and self._job is not None:
            threading.Thread(target=self._queue, args=(missing, list(names)), daemon=True).start()

    def cancel(self) -> None:
        """Remove jobs from the queue. Those that run end with the training."""
        with self._lock:
            self._is_over = True
            for job in self._queued:
                with contextlib.suppress(LaunchError):  # it has ended
                    client.cancel_pending(job)

    def _find_job(self) -> str | None:
        """Return the job of the run if this process is a part of it, else None."""
        job = os.environ.get("SLURM_JOB_ID")
        with contextlib.suppress(RunError):  # the file of the job is damaged
            return job if self._run.job_script.exists() and job == self._run.job else None
        return None

    def _queue(self, missing: int, names: Sequence[str]) -> None:
        with self._lock:
            if self._is_over or self._job is None:
                return
            try:
                working = {_shorten(name) for name in names}
                active = [job for job in self._queued if self._is_expected(job, working)]
                # without lost nodes, which Slurm may still count to this job
                occupied = [
                    name
                    for job in (self._job, *self._queued)
                    for name in self._list_nodes(job)
                    if _shorten(name) in working
                ]
                new = [self._submit(occupied) for _ in range(missing - len(active))]
            except LaunchError as error:
                self._log(f"no job is queued for a node that could join: {error}")
                return
            self._queued = [*active, *new]
            if new:
                self._log(
                    f"{several(missing, 'node')} missing: queued {'jobs' if len(new) > 1 else 'job'} "
                    f"{', '.join(new)} for nodes that join after the next checkpoint"
                )

    def _submit(self, occupied: Sequence[str]) -> str:
        """Queue a job for a node that neither works nor was found to corrupt data."""
        suspects = {_shorten(suspect.host) for suspect in read_suspects(self._run) if suspect.certain}
        corrupt = [name for name in client.list_nodes() if _shorten(name) in suspects] if suspects else []
        return client.submit_joining(self._run.job_script, self._note, sorted({*occupied, *corrupt}))

    def _is_expected(self, job: str, working: Container[str]) -> bool:
        """Return whether a node of this job may still join: the job waits, or its node does not work yet."""
        state = client.status(job)
        if state is None or not state.is_active:
            return False
        return not any(_shorten(name) in working for name in self._list_nodes(job))

    def _list_nodes(self, job: str) -> list[str]:
        state = client.status(job)
        if state is None or state.nodes is None:
            return []
        try:
            return expand_hosts(state.nodes)
        except ValueError as error:
            raise LaunchError(f"the nodes of job {job} cannot be read: {error}") from None

    def _log(self, message: str) -> None:
        newest = events.last(self._run.events, Started, Step, until=(Started, Step))
        step = max((event.step for event in newest if isinstance(event, (Started, Step))), default=0)
        events.append(self._run.events, Noted(step=step, message=message))


def _shorten(host: str) -> str:
    """Return a host name without its domain, which names in Slurm lack."""
    return host.partition(".")[0]

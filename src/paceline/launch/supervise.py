"""Supervise ranks: show their progress, kill those that do not end, and report why a training ended."""

import contextlib
import dataclasses
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Container, Iterator

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline import events
from paceline.doctor.rank_state import read_heartbeats
from paceline.doctor.watchdog import HangWatchdog
from paceline.events import Ended
from paceline.inspect.conclude import conclude
from paceline.launch.failure_cause import find_cause, log_restart, record_silent_failure
from paceline.launch.signals import STOPPED
from paceline.launch.spawn import mark_unfinished
from paceline.launch.worker_processes import LOST, Failures, OnRestart
from paceline.report.progress import watch
from paceline.run import RunFolder

Kill = Callable[[Container[int] | None], list[int]]  # see kill_children
OnStart = Callable[[], None]
FAILED = 2  # exit status of an agent whose failure another agent reports


class EndedElsewhereError(Exception):
    """The training ended on another machine and will not restart."""


class RankLogs(DefaultLogsSpecs):
    """Sends the standard error of rank N to ranks/N.log, where the rank sends its standard output too."""

    def __init__(self, run: RunFolder, attempt: Callable[[], int]):
        super().__init__(log_dir=os.devnull)
        self._run, self._attempt = run, attempt

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # torch numbers the ranks by their position on this machine
        logs = {
            local: str(self._run.rank_log(int(env["RANK"]), self._attempt())) for local, env in envs.items()
        }
        for env in envs.values():
            mark_unfinished(self._run, int(env["RANK"]))
        return dataclasses.replace(super().reify(envs), stderrs=logs)


def supervise(
    run: RunFolder,
    launch: Callable[[OnRestart, OnStart], object],
    kill: Kill | None = None,
    is_reporter: bool = True,
    logs_restarts: bool = True,
) -> int:
    """Call `launch` and return the exit status of the training.

    launch: returns when the ranks are done. It raises ChildFailedError for failed ranks, and SignalException
        if a stop was requested. It calls its first argument with the failed ranks before a restart, and its
        second before each start, when no rank of the previous start is left.
    kill: kills ranks on any machine. None: the ranks are children of this process.
    is_reporter: False for all but one of the agents of several nodes, which report nothing.
    logs_restarts: False if RestartLog writes down why all ranks restart.
    Raises the Error that ended the training, or RankError for a rank that ended without an error message.
    """
    for name in list(logging.root.manager.loggerDict):  # torch's agent would repeat the messages below
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    run.ranks.mkdir(exist_ok=True)
    begin, kill_ranks = events.end(run.events), kill or kill_children
    failures: Failures | None = None
    stopped: SignalException | None = None
    killed: set[int] = set()
    watchdog = HangWatchdog(
        run,
        on_failure=lambda: killed.update(kill_ranks(None)),
        on_hang=lambda ranks: killed.update(
            kill_ranks(_find_pids(run, ranks, None if kill else platform.node()))
        ),
        reports=is_reporter,
    )
    with (
        _show_progress(run, begin) if is_reporter else contextlib.nullcontext(),
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(kill_ranks, None)
        try:
            with watchdog:
                launch(
                    lambda failures: (log_restart if logs_restarts else record_silent_failure)(
                        run, failures, begin, killed, watchdog.diagnosis
                    ),
                    watchdog.begin,
                )
        except EndedElsewhereError:
            failures = {}
        except ChildFailedError as error:
            failures = error.failures
        except SignalException as error:
            stopped = error
    # the last: ranks also stop when all restart with a node that joins
    ended: Ended | None = None
    for event in events.EventReader(run.events, begin).new(Ended):
        ended = event if isinstance(event, Ended) else ended
    if stopped is not None and ended is None and is_reporter:
        print(
            f"paceline: stopped by {stopped.sigval.name} before all ranks had saved; {run.hint()}",
            file=sys.stderr,
        )
    lost = any(child.exitcode == LOST for child in (failures or {}).values())
    if stopped is not None or (ended is not None and ended.reason == "stopped" and not lost):
        return STOPPED
    if failures is None:
        return 0
    if not is_reporter:
        record_silent_failure(run, failures, begin, killed)
        return FAILED
    raise find_cause(run, failures, begin, killed, watchdog.diagnosis)


@contextlib.contextmanager
def _show_progress(run: RunFolder, begin: int) -> Iterator[None]:
    """Show the events after `begin` until the context ends."""
    is_over = threading.Event()
    watcher = threading.Thread(
        target=watch,
        args=(events.follow(run.events, is_over.is_set, begin), run, None, conclude),
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _find_pids(run: RunFolder, ranks: Container[int], host: str | None) -> set[int]:
    """Return the process ids of these ranks on a host, or on all hosts."""
    return {
        beat.pid
        for beat in read_heartbeats(run)
        if beat is not None and host in (None, beat.host) and beat.rank in ranks
    }


def kill_children(only: Container[int] | None = None, keep: Container[int] = ()) -> list[int]:
    """Kill the descendants of this process, restricted to `only` and without `keep`, and return their ids.

    torch's agent waits longer, and leaves its ranks running after a second interrupt.
    """
    killed: list[int] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in keep and (only is None or child.pid in only):
                child.kill()
                killed.append(child.pid)
    return killed

"""Stand by ranks that an agent starts: show what happens, end who does not end by himself, and say what became of them."""

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
from paceline.launch.failure_cause import cause, log_restart, tell_of_silent
from paceline.launch.signals import STOPPED
from paceline.launch.spawn import begin
from paceline.launch.worker_processes import LOST, Again, Failures
from paceline.report.progress import watch
from paceline.run import RunFolder

End = Callable[[Container[int] | None], list[int]]  # see end_children
Begin = Callable[[], None]
FAILED = 2  # exit status of an agent for which another one speaks


class EndedElsewhereError(Exception):
    """Ranks on another machine have ended for good, and with them the training."""


class RankLogs(DefaultLogsSpecs):
    """Standard error of rank N goes to ranks/N.log; the rank sends its standard output there too, and has not finished yet."""

    def __init__(self, run: RunFolder, attempt: Callable[[], int]):
        super().__init__(log_dir=os.devnull)
        self._run, self._attempt = run, attempt

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # torch numbers them by their place on this machine.
        logs = {
            local: str(self._run.rank_log(int(env["RANK"]), self._attempt())) for local, env in envs.items()
        }
        for env in envs.values():
            begin(self._run, int(env["RANK"]))
        return dataclasses.replace(super().reify(envs), stderrs=logs)


def attend(
    run: RunFolder,
    launch: Callable[[Again, Begin], object],
    end: End | None = None,
    speaks: bool = True,
    rounds: bool = False,
) -> int:
    """Call `launch`, which returns when the ranks are done, or raises what ended them. Returns the exit status.

    launch: raises ChildFailedError for ranks that failed and SignalException where it was asked to stop. It calls its first argument with
    the ranks that failed before all are started again, and its second before each start, when no rank of the last start is left.
    end: ends ranks at once, on whatever machine; None: they are children of this process.
    speaks: of the agents of several nodes, whether this one says what there is to say. `rounds`: another one says why all start again.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    for name in list(logging.root.manager.loggerDict):  # what the agent would say is said below, once
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    run.ranks.mkdir(exist_ok=True)
    before, end_ranks = events.end(run.events), end or end_children
    failures: Failures | None = None
    stopped: SignalException | None = None
    left: set[int] = set()
    watchdog = HangWatchdog(
        run,
        on_failure=lambda: left.update(end_ranks(None)),
        on_hang=lambda ranks: left.update(end_ranks(_of_ranks(run, ranks, None if end else platform.node()))),
        reports=speaks,
    )
    with _watched(run, before) if speaks else contextlib.nullcontext(), contextlib.ExitStack() as over:
        over.callback(end_ranks, None)
        try:
            with watchdog:
                launch(
                    lambda failures: (tell_of_silent if rounds else log_restart)(
                        run, failures, before, left, watchdog.diagnosis
                    ),
                    watchdog.begin,
                )
        except EndedElsewhereError:
            failures = {}
        except ChildFailedError as error:
            failures = error.failures
        except SignalException as error:
            stopped = error
    ended = next(
        (event for event in events.EventReader(run.events, before).new(Ended) if isinstance(event, Ended)),
        None,
    )
    if stopped is not None and ended is None and speaks:
        print(
            f"paceline: stopped by {stopped.sigval.name} before all ranks had saved; {run.hint()}",
            file=sys.stderr,
        )
    lost = any(child.exitcode == LOST for child in (failures or {}).values())
    if stopped is not None or (ended is not None and ended.reason == "stopped" and not lost):
        return STOPPED
    if failures is None:
        return 0
    if not speaks:
        tell_of_silent(run, failures, before, left)
        return FAILED
    raise cause(run, failures, before, left, watchdog.diagnosis)


@contextlib.contextmanager
def _watched(run: RunFolder, before: int) -> Iterator[None]:
    over = threading.Event()
    watcher = threading.Thread(
        target=watch, args=(events.follow(run.events, over.is_set, before), run), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _of_ranks(run: RunFolder, ranks: Container[int], host: str | None) -> set[int]:
    """The processes of these ranks that are on this machine, or on any."""
    return {
        one.pid
        for one in read_heartbeats(run)
        if one is not None and host in (None, one.host) and one.rank in ranks
    }


def end_children(only: Container[int] | None = None, kept: Container[int] = ()) -> list[int]:
    """Kill `only` these of the processes that this one started, or all but `kept`; return their ids. (torch's agent waits longer, and
    leaves its ranks behind after a second interrupt.)"""
    ended: list[int] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in kept and (only is None or child.pid in only):
                child.kill()
                ended.append(child.pid)
    return ended

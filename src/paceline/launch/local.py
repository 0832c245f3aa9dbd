"""Start ranks on this machine through torchrun's elastic agent, and say clearly what became of them."""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from paceline import events
from paceline.doctor.diagnose import Diagnosis
from paceline.doctor.lookout import Lookout
from paceline.errors import Error, RankError
from paceline.events import Ended, Event, Failed, Started, Step
from paceline.launch.processes import LOST, here, launch, servers
from paceline.launch.signals import STOPPED, stop_signals
from paceline.report.watch import watch
from paceline.run import RunFolder

LOG_LINES = 20  # of a dead rank, shown with its name
AGENT_WAITS_S = 30  # for ranks that it has sent SIGTERM, before it kills them (torch 2.13)
End = Callable[[float | None, Container[int] | None], list[int]]  # see _end_children
GRACE_S = 3  # that a rank has to end once another one has failed; one that is stopped or stuck never would


class _RankLogs(DefaultLogsSpecs):
    """Standard error of rank N goes to ranks/N.log; the rank sends its standard output there too."""

    def __init__(self, run: RunFolder):
        super().__init__(log_dir=os.devnull)
        self._run = run

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        logs = {rank: str(self._run.rank_log(rank, attempt)) for rank in envs}
        return dataclasses.replace(super().reify(envs), stderrs=logs)


def start(run: RunFolder, ranks: int, restarts: int) -> int:
    """Train the request of `run` on so many ranks, showing what happens; returns the exit status.

    A rank that dies is started again with all others, from the last good checkpoint, up to `restarts` times.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    if servers(run):
        return supervise(run, lambda: launch(run, here(ranks), restarts), _end_children)
    return supervise(run, lambda: _launch_agent(run, ranks, restarts), _end_children)


def _launch_agent(run: RunFolder, ranks: int, restarts: int) -> None:
    for name in list(logging.root.manager.loggerDict):  # what the agent would say is said below, once
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # 0: a free port
        local_addr="127.0.0.1",
        run_id=run.path.name,
        max_restarts=restarts,
        logs_specs=_RankLogs(run),
        signals_to_handle=",".join(number.name for number in stop_signals()),
    )
    launch_agent(config, sys.executable, ["-m", "paceline", "rank", str(run.path), str(os.getpid())])


def supervise(run: RunFolder, launch: Callable[[], None], end: End) -> int:
    """Show what happens while `launch` starts ranks and waits for them, and say clearly what became of them; returns the exit status.

    launch: raises ChildFailedError for ranks that failed and SignalException where it was asked to stop. end: ends ranks at once.
    """
    run.ranks.mkdir(exist_ok=True)
    before = events.end(run.events)
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(events.follow(run.events, over.is_set, before), run), daemon=True)
    watcher.start()
    failure: ChildFailedError | None = None
    stopped: SignalException | None = None
    left: set[int] = set()
    lookout = Lookout(run, failed=lambda at: left.update(end(at, None)), hung=lambda found: left.update(end(None, _kept_by(found))))
    try:
        with lookout:
            launch()
    except ChildFailedError as error:
        failure = error
    except SignalException as error:
        stopped = error
    finally:
        end(None, None)
        over.set()
        watcher.join()
    ended = next((event for event in _happened(run, before) if isinstance(event, Ended)), None)
    if stopped is not None and ended is None:
        print(f"paceline: stopped by {stopped.sigval.name} before all ranks had saved; {run.way_out()}", file=sys.stderr)
    lost = failure is not None and any(child.exitcode == LOST for child in failure.failures.values())
    if stopped is not None or (ended is not None and ended.reason == "stopped" and not lost):
        return STOPPED
    if failure is None:
        return 0
    raise _cause(run, failure, before, left, lookout.found)


def _kept_by(found: Diagnosis) -> set[int]:
    """The processes of the ranks for which the others wait, or of all."""
    return {one.beat.pid for one in found.seen if one.beat is not None and (one.rank in found.at_fault or not found.at_fault)}


def _end_children(before: float | None, only: Container[int] | None) -> list[int]:
    """Of the processes that this one started, those that were there `before` a rank failed some seconds ago, or `only` these, or all; which
    it did. The agent would wait longer, and leaves its ranks behind after a second interrupt."""
    ended: list[int] = []
    if before is not None and time.time() < before + GRACE_S:
        return ended
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (before is None or child.create_time() < before) and (only is None or child.pid in only):
                child.kill()
                ended.append(child.pid)
    return ended


def _happened(run: RunFolder, before: int) -> list[Event]:
    return list(events.read(run.events, before)) if run.events.exists() else []


def _log(run: RunFolder, rank: int) -> Path:
    """The log of its last start."""
    return max(run.ranks.glob(f"{rank}.*log"), key=lambda path: path.stat().st_mtime, default=run.rank_log(rank))


def _cause(run: RunFolder, failure: ChildFailedError, before: int, left: Container[int], stuck: Diagnosis | None) -> Error:
    """The one rank that failed first, of those that failed with it; `left`: processes that were ended since they did not end with it."""
    happened = _happened(run, before)
    happened = happened[max((at for at, event in enumerate(happened) if isinstance(event, Started)), default=0) :]  # of the last start
    told = {event.rank: event for event in happened if isinstance(event, Failed) and event.what == "run"}
    meant = [event for event in told.values() if event.meant]
    if meant:
        error = Error(meant[0].message)
        error.__cause__ = RankError(_log(run, meant[0].rank or 0).read_text(errors="replace"))  # for --debug
        return error
    # A rank that was killed said nothing, and neither did those that the agent then ended.
    first_at = min(child.timestamp for child in failure.failures.values())
    silent = [
        (rank, child)
        for rank, child in failure.failures.items()
        if child.exitcode < 0
        and child.exitcode != -signal.SIGTERM
        and child.timestamp < first_at + AGENT_WAITS_S
        and rank not in told
        and child.pid not in left
    ]
    own = [event for event in told.values() if not event.lost_peer]
    step = max((event.step for event in happened if isinstance(event, (Started, Step))), default=0)
    if stuck is not None and not silent and not own:
        message = f"{stuck.sentence}; it was given up after step {step}, more in {run.diagnosis}; {run.way_out()}"
        with contextlib.closing(events.Writer(run.events)) as writer:
            writer.write(Failed(what="run", step=step, rank=next(iter(stuck.at_fault), None), message=message))
        return RankError(message)
    if silent:
        rank, child = silent[0]
        why = "was lost with its node" if child.exitcode == LOST else f"was killed by {signal.Signals(-child.exitcode).name}"
    elif own:
        rank, why = own[0].rank or 0, own[0].message
    else:
        rank, child = min(failure.failures.items(), key=lambda item: item[1].timestamp)
        why = told[rank].message if rank in told else f"ended with exit status {child.exitcode}"
    log = _log(run, rank)
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    end = "\n".join(f"  {line}" for line in lines)
    message = f"rank {rank} {why if silent else 'failed: ' + why}, after step {step}; {run.way_out()}"
    with contextlib.closing(events.Writer(run.events)) as writer:
        if silent:
            writer.write(Failed(what="run", step=step, rank=rank, message=message))
    return RankError(f"{message}\nThe end of {log}:\n{end}" if end else f"{message}\n{log} is empty")

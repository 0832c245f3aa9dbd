"""Start ranks as processes, on this machine or others, and watch them.

torchrun's agent ends all ranks when any of them dies. Here workers of a parameter server may die.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from paceline.distributed.store import LOOPBACK, open_store
from paceline.errors import LaunchError
from paceline.launch.fork_server import RankForkServer
from paceline.launch.nsys import NsysSlot, make_report_folder
from paceline.launch.signals import list_stop_signals
from paceline.launch.spawn import build_rank_environments, spawn
from paceline.plan.plan import parse
from paceline.run import RunFolder

Failures = Mapping[int, ProcessFailure]  # by rank
OnRestart = Callable[[Failures], None]  # called with the failed ranks before all ranks restart
POLL_S = 0.1
LOST = -1000  # exit status of a rank whose node is lost: below those of signals
EXIT_S = 5.0  # for ranks to end by themselves after another rank failed
SAVING_S = 30.0  # for ranks to save after a request to stop, as in torchrun's agent


class Process(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class Slot(Protocol):
    """A place where a rank can be started."""

    @property
    def node(self) -> str: ...

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> Process: ...


class StopRequest:
    """A request to stop.

    The first stop signal is remembered; the second ends the launcher and its ranks at once.
    """

    def __enter__(self) -> "StopRequest":
        self._signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._request) for number in list_stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        is_second, self._signal = self._signal is not None, signal.Signals(number)
        if is_second:
            self.check()

    def check(self) -> None:
        """Raise SignalException if a stop was requested."""
        if self._signal is not None:
            raise SignalException(f"asked to stop by {self._signal.name}", self._signal)


# Opens the slots of the n-th start: one per rank, those of a node next to each other.
Slots = Callable[[int, StopRequest], AbstractContextManager[Sequence[Slot]]]


class _LocalSlot:
    """A slot on this machine, in which a rank is spawned."""

    node = "localhost"

    def __init__(self, task_file: Path | None):
        self._task_file = task_file

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> Process:
        return spawn(run, environ, log, self._task_file)


def use_this_machine(
    ranks: int,
    server: RankForkServer | None,
    task_file: Path | None = None,
    nsys: RunFolder | None = None,
) -> Slots:
    """Return slots on this machine. Ranks are forked if there is a fork server, else spawned.

    nsys: a run whose ranks are spawned under Nsight Systems."""

    @contextlib.contextmanager
    def open_slots(attempt: int, stop: StopRequest) -> Iterator[Sequence[Slot]]:
        if nsys is not None:
            yield [NsysSlot(make_report_folder(nsys), task_file)] * ranks
            return
        while server is not None and not server.has_answered(POLL_S):
            stop.check()
        yield [server or _LocalSlot(task_file)] * ranks

    return open_slots


def count_servers(run: RunFolder) -> int | None:
    """Return the number of parameter servers, or None for a plan without them.

    Ranks that are not servers may die.
    """
    plan = run.next_request()[1].plan
    return parse(plan).servers if plan is not None else None


def launch(
    run: RunFolder,
    slots: Slots,
    restarts: int,
    on_restart: OnRestart,
    on_start: Callable[[], None],
    host: str = LOOPBACK,
) -> None:
    """Start the ranks and return when all of them are done.

    restarts: the maximum number of restarts of all ranks.
    on_restart: called with the failed ranks before a restart.
    on_start: called before each start.
    host: the address of this machine for the ranks.
    Raises ChildFailedError if ranks fail after the last restart, and SignalException if a stop was requested.
    """
    failed: dict[int, ProcessFailure] = {}
    with StopRequest() as stop:
        for attempt in range(restarts + 1):
            try:
                with slots(attempt, stop) as opened:
                    if failed:
                        on_restart(failed)
                    on_start()
                    failed = _run(run, opened, attempt, stop, host)
            except LaunchError as error:
                if not failed:
                    raise
                # at the first start there was room for all ranks
                print(f"paceline: not restarted: {error}", file=sys.stderr)
                break
            if not failed:
                return
    raise ChildFailedError("paceline", failed)


def _run(
    run: RunFolder, slots: Sequence[Slot], attempt: int, stop: StopRequest, host: str
) -> dict[int, ProcessFailure]:
    """Start one rank per slot and wait for them. Return the failed ranks."""
    store = open_store(host)
    environments = build_rank_environments(
        [slot.node for slot in slots], host, store.port, run.path.name, attempt
    )
    running: list[Process] = []
    needed = count_servers(run) or len(slots)
    try:
        for rank, (slot, environ) in enumerate(zip(slots, environments, strict=True)):
            stop.check()
            running.append(slot.start(run.path, environ, run.rank_log(rank, attempt)))
        _watch(running, needed, stop)
        _wait(running, EXIT_S)
        return {
            rank: ProcessFailure(rank, running[rank].pid, status, os.devnull)
            for rank, status in _find_failures(running, needed).items()
        }
    except SignalException:
        _signal(running, signal.SIGTERM)
        _wait(running, SAVING_S)
        raise
    finally:
        _signal(running, signal.SIGKILL)
        _wait(running, EXIT_S)


def _watch(running: Sequence[Process], needed: int, stop: StopRequest) -> None:
    """Wait until all ranks are done, or one has failed."""
    while not _find_failures(running, needed) and any(process.poll() is None for process in running):
        stop.check()
        time.sleep(POLL_S)


def _find_failures(running: Sequence[Process], needed: int) -> dict[int, int]:
    """Return the exit status of failed ranks.

    A rank from `needed` on may be killed, but must not fail otherwise.
    """
    statuses = {
        rank: status for rank, process in enumerate(running) if (status := process.poll()) is not None
    }
    return {rank: status for rank, status in statuses.items() if status > 0 or (status < 0 and rank < needed)}


def _signal(running: Sequence[Process], number: int) -> None:
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)


def _wait(running: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(POLL_S)

"""Start ranks as processes, here or elsewhere, and watch them: torchrun's agent ends all of them when one dies."""

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
from paceline.launch.fork_server import ForkServer
from paceline.launch.signals import stop_signals
from paceline.launch.spawn import environments, spawn
from paceline.plan.plan import parse
from paceline.run import RunFolder

Failures = Mapping[int, ProcessFailure]  # by rank
Again = Callable[[Failures], None]
POLL_S = 0.1
LOST = -1000  # the exit status of a rank that nothing is heard of any more: below those of signals
LAST_WORDS_S = 5.0  # for ranks that have lost another one
SAVING_S = 30.0  # for ranks that were asked to stop; as torchrun's agent does


class Process(Protocol):
    """What is used of a `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class Slot(Protocol):
    """Room for a rank."""

    @property
    def node(self) -> str: ...

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> Process: ...


class StopRequest:
    """The first of the signals that ask for a stop is remembered, the second one ends the launcher and its ranks at once."""

    def __enter__(self) -> "StopRequest":
        self._signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self._signal = self._signal is not None, signal.Signals(number)
        if again:
            self.heed()

    def heed(self) -> None:
        """Raises SignalException if there was one."""
        if self._signal is not None:
            raise SignalException(f"asked to stop by {self._signal.name}", self._signal)


# For the n-th start: one slot a rank, those of a node side by side.
Slots = Callable[[int, StopRequest], AbstractContextManager[Sequence[Slot]]]


class _Here:
    node = "localhost"
    start = staticmethod(spawn)


def here(ranks: int, server: ForkServer | None) -> Slots:
    """All on this machine, forked where there is a fork server."""

    @contextlib.contextmanager
    def room(attempt: int, asked: StopRequest) -> Iterator[Sequence[Slot]]:
        while server is not None and not server.has_answered(POLL_S):
            asked.heed()
        yield [server or _Here()] * ranks

    return room


def servers(run: RunFolder) -> int | None:
    """How many keep the weights; of the other ranks any may be killed. None: there are none, and all ranks are needed."""
    plan = run.next_request()[1].plan
    return parse(plan).servers if plan is not None else None


def launch(
    run: RunFolder, slots: Slots, restarts: int, again: Again, begin: Callable[[], None], host: str = LOOPBACK
) -> None:
    """Returns when all ranks are done. host: this machine, as the ranks know it. `again`: called with those that failed before all are
    started again; `begin` before each start.

    Raises ChildFailedError for a rank that died or failed, after so many restarts of all, and SignalException when this process was
    asked to stop.
    """
    failed: dict[int, ProcessFailure] = {}
    with StopRequest() as asked:
        for attempt in range(restarts + 1):
            try:
                with slots(attempt, asked) as room:
                    if failed:
                        again(failed)
                    begin()
                    failed = _run(run, room, attempt, asked, host)
            except LaunchError as error:
                if not failed:
                    raise
                print(
                    f"paceline: not started again: {error}", file=sys.stderr
                )  # there was room for all before
                break
            if not failed:
                return
    raise ChildFailedError("paceline", failed)


def _run(
    run: RunFolder, room: Sequence[Slot], attempt: int, asked: StopRequest, host: str
) -> dict[int, ProcessFailure]:
    """Those that failed."""
    store = open_store(host)
    told = environments([slot.node for slot in room], host, store.port, run.path.name, attempt)
    running: list[Process] = []
    needed = servers(run) or len(room)
    try:
        for rank, (slot, environ) in enumerate(zip(room, told, strict=True)):
            asked.heed()
            running.append(slot.start(run.path, environ, run.rank_log(rank, attempt)))
        _watch(running, needed, asked)
        _wait(running, LAST_WORDS_S)
        return {
            rank: ProcessFailure(rank, running[rank].pid, status, os.devnull)
            for rank, status in _failed(running, needed).items()
        }
    except SignalException:
        _signal(running, signal.SIGTERM)
        _wait(running, SAVING_S)
        raise
    finally:
        _signal(running, signal.SIGKILL)
        _wait(running, LAST_WORDS_S)


def _watch(running: Sequence[Process], needed: int, asked: StopRequest) -> None:
    """Until all are done, or one has failed."""
    while not _failed(running, needed) and any(process.poll() is None for process in running):
        asked.heed()
        time.sleep(POLL_S)


def _failed(running: Sequence[Process], needed: int) -> dict[int, int]:
    """The exit status of those that failed in a way that matters: one of the first `needed`, or one that was not killed."""
    over = {rank: status for rank, process in enumerate(running) if (status := process.poll()) is not None}
    return {rank: status for rank, status in over.items() if status > 0 or (status < 0 and rank < needed)}


def _signal(running: Sequence[Process], number: int) -> None:
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)


def _wait(running: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(POLL_S)

"""A fixed set of ranks on one or more nodes, which trials share."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from paceline.errors import LaunchError
from paceline.launch.fork_server import ForkServer
from paceline.launch.signals import STOPPED
from paceline.launch.spawn import Child

STOP_S = 40.0  # for a trial to save after a request to stop
POLL_S = 0.02


class Node(Protocol):
    """A machine on which trials train. ranks: the number of ranks that it has for them."""

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

    def wait_until_ready(self) -> float:
        """Return the number of cores for trials. Raises LaunchError if the node cannot start any."""

    def start(
        self, run: Path, log: Path, ranks: int, slots: Sequence[int], hosts: Sequence[str] = ()
    ) -> Child:
        """Start the training of a run folder on the ranks of the node with these numbers.

        hosts: the names of all nodes on which it trains, if there are several.
        """

    def check(self) -> None:
        """Wait until it is known whether the node is lost."""

    def watch(self, child: Child) -> int | None:
        """Return a descriptor that can be read when a trial has ended; None if the trial must be polled."""


@dataclass
class RunningTrial:
    """A trial that trains. slots: the numbers of the ranks that it occupies on each of its nodes.

    started: by the monotonic clock. log: what its process prints, after the output of earlier starts.
    watched: a descriptor that can be read when it has ended. seconds: of its training, when it has ended.
    """

    number: int
    process: Child
    nodes: list[Node]
    slots: list[int]
    started: float
    log: Path
    log_begin: int
    watched: int | None
    seconds: float = 0.0
    asked_to_stop: float | None = None  # by the monotonic clock

    @property
    def is_lost(self) -> bool:
        """Whether a node of the trial was lost."""
        return any(node.is_lost for node in self.nodes)

    def read_output(self) -> str:
        """Return what the process has printed since this start."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_begin)
            return file.read().decode(errors="replace")
        return ""

    def stop(self) -> None:
        """Ask the ranks to save and end."""
        if self.asked_to_stop is None:
            self.asked_to_stop = time.monotonic()
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End the process; its ranks end when it is gone."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Executor:
    """A pool of ranks of some nodes. A trial occupies ranks of one node, so that they are close.

    A trial of more ranks than a node has occupies several nodes completely.

    As a context, it waits until the nodes are ready, and at the end stops all trials.
    server: from which this machine forks processes.
    """

    def __init__(self, nodes: Sequence[Node], server: ForkServer | None = None):
        self.nodes, self.server = list(nodes), server
        self.running: dict[int, RunningTrial] = {}
        self.cores_per_rank = 1.0
        self._free = {node.name: list(range(node.ranks)) for node in nodes}

    def __enter__(self) -> "Executor":
        self.cores_per_rank = min(node.wait_until_ready() / node.ranks for node in self.nodes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def has_room(self, ranks: int) -> bool:
        """Return whether a trial of that many ranks can start now. Raises LaunchError if no node is left."""
        if all(node.is_lost for node in self.nodes):
            raise LaunchError(
                "all nodes of the study were lost; continue with --resume when there are others"
            )
        return bool(self._find_nodes(ranks))

    def check_loss(self) -> None:
        """Raise LaunchError if nodes were lost, for a trial that has no room though no other trial trains."""
        lost = [node.name for node in self.nodes if node.is_lost]
        if lost:
            rest = [node for node in self.nodes if not node.is_lost]
            verb = "was" if len(lost) == 1 else "were"
            raise LaunchError(
                f"{' and '.join(lost)} {verb} lost, and the next trial needs more ranks than the "
                f"{sum(node.ranks for node in rest)} of {' and '.join(node.name for node in rest)}; "
                "continue with --resume when there are others"
            )

    def _find_nodes(self, ranks: int) -> list[Node]:
        """Return the node with the fewest free ranks that are enough, or several free nodes. None: empty."""
        alive = [node for node in self.nodes if not node.is_lost]
        fitting = [node for node in alive if len(self._free[node.name]) >= ranks]
        if fitting:
            return [min(fitting, key=lambda node: len(self._free[node.name]))]
        free = [node for node in alive if len(self._free[node.name]) == node.ranks < ranks]
        count = ranks // free[0].ranks if free else 0
        return free[:count] if len(free) >= count else []

    def start(self, number: int, run: Path, log: Path, ranks: int) -> None:
        """Start the training of a run folder on free ranks of a node, or on several free nodes."""
        nodes = self._find_nodes(ranks)
        slots = self._free[nodes[0].name][:ranks]
        for node in nodes:
            self._free[node.name] = self._free[node.name][len(slots) :]
        with open(log, "ab") as output:
            log_begin = output.tell()
        hosts = [node.name for node in nodes] if len(nodes) > 1 else []
        process = nodes[0].start(run.absolute(), log.absolute(), ranks, slots, hosts)
        started, watched = time.monotonic(), nodes[0].watch(process)
        self.running[number] = RunningTrial(number, process, nodes, slots, started, log, log_begin, watched)

    def wait(self, timeout_s: float) -> None:
        """Wait until a trial of this machine has ended, or for a time."""
        ends = select.poll()
        for trial in self.running.values():
            if trial.watched is not None:
                ends.register(trial.watched, select.POLLIN)
        ends.poll(1000 * timeout_s)

    def collect(self) -> Iterator[tuple[RunningTrial, int]]:
        """Yield the trials that have ended since the last call, with their exit status.

        Those that were asked to stop and do not end in time are killed.
        """
        for trial in list(self.running.values()):
            if trial.asked_to_stop is not None and time.monotonic() > trial.asked_to_stop + STOP_S:
                trial.kill()
            if (status := trial.process.poll()) is not None:
                del self.running[trial.number]
                trial.seconds = time.monotonic() - trial.started
                if trial.watched is not None:
                    os.close(trial.watched)
                for node in trial.nodes:
                    self._free[node.name] = sorted([*self._free[node.name], *trial.slots])
                    if status not in (0, STOPPED) and len(trial.nodes) > 1:  # because a node was lost?
                        node.check()
                yield trial, status

    def stop_all(self) -> None:
        """Let all trials save and end, and kill those that do not."""
        for trial in self.running.values():
            trial.stop()
        deadline = time.monotonic() + STOP_S
        while self.running and time.monotonic() < deadline:
            for _ in self.collect():
                pass
            self.wait(POLL_S)
        for trial in self.running.values():
            trial.kill()
            trial.process.wait()
        for _ in self.collect():
            pass

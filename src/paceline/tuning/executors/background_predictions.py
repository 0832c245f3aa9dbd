"""Predictions of trials that already train, for comparison with what is then measured."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Self

from paceline.launch.fork_server import ForkServer
from paceline.launch.spawn import Child, describe_exit
from paceline.spec import Launch, Spec
from paceline.tuning.executors.local_node import start_process
from paceline.tuning.executors.pool import POLL_S

LIMIT_S = 60.0  # for one prediction
END_S = 10.0  # for those that are left when all trials are over


@dataclass(frozen=True)
class TrialPrediction:
    """What is predicted of a trial; nothing, and the reason, if it cannot be predicted."""

    quantities: dict[str, float]
    problem: str = ""


@dataclass
class _Running:
    process: Child
    output: IO[bytes]
    deadline: float  # by the monotonic clock


class BackgroundPredictions:
    """Predicts trials one after another, each in a process of low priority.

    A prediction runs code of the task. In a process of its own, a task that crashes or hangs costs no more
    than its prediction. Trials that differ only in what no prediction depends on share one.

    A context manager, which finally ends the process.
    server: from which processes are forked. None: they are spawned.
    """

    def __init__(self, server: ForkServer | None):
        self._server = server
        self._queue: deque[tuple[int, Spec, Launch, int]] = deque()
        self._known: dict[str, TrialPrediction] = {}
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._running is not None:
            _end(self._running)

    def add(self, trial: int, spec: Spec, launch: Launch, ranks: int) -> None:
        """Predict a trial later. spec, launch: of its whole training."""
        self._queue.append((trial, spec, launch, ranks))

    def collect(self) -> Iterator[tuple[int, TrialPrediction]]:
        """Yield the trials that have been predicted since the last call, and start the next prediction."""
        while self._queue:
            trial, spec, launch, ranks = self._queue[0]
            key = _describe(spec, launch, ranks)
            if key not in self._known:
                if self._running is None:
                    self._running = self._start(spec, launch, ranks)
                    return
                if (status := self._poll(self._running)) is None:
                    return
                self._known[key] = _read(self._running, status)
                self._running = None
            self._queue.popleft()
            yield trial, self._known[key]

    def finish(self) -> Iterator[tuple[int, TrialPrediction]]:
        """Yield the predictions that are left. Those that take too long are given up."""
        deadline = time.monotonic() + END_S
        while self._queue and time.monotonic() < deadline:
            yield from self.collect()
            time.sleep(POLL_S)
        while self._queue:
            yield self._queue.popleft()[0], TrialPrediction({}, "the study ended before the prediction")

    def _start(self, spec: Spec, launch: Launch, ranks: int) -> _Running:
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_read` or `_end`)
        words = ["predict", spec.model_dump_json(), launch.model_dump_json(), str(ranks), str(os.getpid())]
        return _Running(start_process(self._server, words, {}, output), output, time.monotonic() + LIMIT_S)

    def _poll(self, running: _Running) -> int | None:
        status = running.process.poll()
        if status is None and time.monotonic() > running.deadline:
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGKILL)
            status = running.process.wait()
        return status


def _describe(spec: Spec, launch: Launch, ranks: int) -> str:
    """Return the parts of a request on which a prediction depends."""
    optimizer = spec.optimizer.model_copy(update={"lr": None})
    rest = spec.model_copy(update={"optimizer": optimizer, "seed": 0, "schedule": None})
    return f"{ranks} {launch.plan} {launch.device} {rest!r}"


def _read(running: _Running, status: int) -> TrialPrediction:
    """Return the prediction that a process printed, or why there is none."""
    with running.output as output:
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if time.monotonic() > running.deadline:
        return TrialPrediction({}, f"the prediction took longer than {LIMIT_S:.0f} s")
    if status == 0 and lines:  # the task may have ended the process, and printed anything before
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            return TrialPrediction({name: float(value) for name, value in json.loads(lines[-1]).items()})
    said = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    if said:
        return TrialPrediction({}, said[-1])
    end = describe_exit(status) if status else "failed: ended with exit status 0 before it was over"
    return TrialPrediction({}, f"the prediction {end}")


def _end(running: _Running) -> None:
    with running.output, contextlib.suppress(ProcessLookupError):
        running.process.send_signal(signal.SIGKILL)
    running.process.wait()

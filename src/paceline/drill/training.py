"""One training in the hands of a drill: started by its command line, followed through files, ended with all that it started."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from paceline import events
from paceline.drill import sample_audit
from paceline.drill.sample_audit import Start
from paceline.events import Ended, Failed, Stalled, Started
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder

MARK = "PACELINE_DRILL"  # the same for all that a training starts, so that it is found again under another parent too
NUMBER = "PACELINE_DRILL_COMMAND"  # which of them
STEP_S = 0.12  # that a step is made to take until it is disturbed
SLOW_STEP_S = 1.0  # where something must be there first
POLL_S = 0.01
GONE_S = 15.0  # that ranks may take to save and end after their launcher
SAMPLE_LOG, PACE = "samples", "pace"


class UnexpectedCourse(Exception):
    """A training took another course than it should."""


class Training:
    """A context: whatever was started is killed at its end."""

    def __init__(
        self, folder: Path, run: RunFolder, plan: ResolvedPlan, limit_s: float, env: Mapping[str, str] = {}
    ):
        self.folder, self.run, self.plan, self.limit_s = folder, run, plan, limit_s
        self.noticed: float | None = None  # when there was a first sign of trouble, of the monotonic clock
        self.sign = ""  # in the words of the run
        self._mark, self._env, self._commands = uuid.uuid4().hex, env, 0
        self._ports: set[int] = set()
        self._read = 0
        self._others: list[psutil.Process] = []
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        if hasattr(self, "process"):
            self.process.wait()

    def start(self, *words: str) -> None:
        """`paceline WORDS`, with what it prints in output-N.txt."""
        self._commands += 1
        env = {**os.environ, **self._env, MARK: self._mark, NUMBER: str(self._commands)}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        """Of the last command."""
        return self.folder / f"output-{self._commands}.txt"

    def said(self) -> str:
        """The last line that a command printed."""
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    # What goes on

    def starts(self) -> list[Start]:
        return sample_audit.read(self.folder / SAMPLE_LOG, self.plan)

    def started(self) -> int:
        """How often the ranks were started, also where nothing was left to do."""
        return (
            sum(isinstance(event, Started) for event in events.read(self.run.events))
            if self.run.events.exists()
            else 0
        )

    def steps_done(self) -> int:
        """Since the ranks were started last."""
        starts = self.starts()
        return max(len(updates) for updates in starts[-1].values()) if starts else 0

    def ranks(self) -> dict[int, psutil.Process]:
        """Those that are alive, of the launcher that is."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):
                    found[int(process.environ()["RANK"])] = process
        return found

    def left(self) -> list[psutil.Process]:
        """What is alive of what was started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # Waiting

    def until(
        self, holds: Callable[[], bool], what: str, limit_s: float | None = None, poll_s: float = POLL_S
    ) -> None:
        deadline = time.monotonic() + (limit_s or self.limit_s)
        while not holds():
            if time.monotonic() > deadline:
                raise UnexpectedCourse(
                    f"{what} did not come in {limit_s or self.limit_s:.0f} s; it said: {self.said()}"
                )
            time.sleep(poll_s)

    def until_late(self, seconds: float) -> None:
        """Or until the command has ended."""
        deadline = time.monotonic() + seconds

        def over() -> bool:
            self._notice()
            return time.monotonic() > deadline or self.process.poll() is not None

        self.until(over, "that time")

    def until_step(self, step: int, checkpoints: int) -> None:
        """Until so many steps are done, and complete checkpoints there: the steps become slow where those are late."""

        def holds() -> bool:
            if self.process.poll() is not None:
                raise UnexpectedCourse(
                    f"it ended with exit status {self.process.returncode} before step {step}; it said: {self.said()}"
                )
            late = self.steps_done() >= step
            if late and len(self.run.checkpoints()) < checkpoints:
                self.pace(SLOW_STEP_S)
                return False
            return late

        self.until(holds, f"step {step}")

    def until_ended(self) -> int:
        """The exit status of the command."""

        def ended() -> bool:
            self._notice()
            return self.process.poll() is not None

        self.until(ended, "the end of the command")
        return self.process.wait()

    def _notice(self) -> None:
        """The first sign of trouble: what the run says of it, or that a rank has ended that nobody disturbed."""
        if self.noticed is not None or not self.run.events.exists():
            return
        has_ended = not all(
            map(is_alive, self._others)
        )  # asked first: a rank that is done says so before it ends
        before, self._read = self._read, events.end(self.run.events)
        for event in events.read(self.run.events, before) if self._read > before else ():
            if isinstance(event, Stalled) or (isinstance(event, Failed) and event.what == "run"):
                self.noticed, self.sign = time.monotonic(), event.message
            elif isinstance(event, Ended):
                has_ended = event.reason == "stopped"
                self._others = []
        if self.noticed is None and has_ended:
            self.noticed, self.sign = time.monotonic(), "a rank ended"

    def remains(self) -> str | None:
        """What is left some seconds after the end of a command, processes or ports; it is ended."""

        def gone() -> bool:
            self._notice()
            return not self.left() and not self._ports_left()

        with contextlib.suppress(UnexpectedCourse):
            self.until(gone, "the end of all processes", GONE_S, poll_s=0.05)
            return None
        left = [
            f"process {process.pid} ({' '.join(process.cmdline()[-3:])})"
            for process in self.left()
            if is_alive(process)
        ]
        left += [f"port {port}, which no process has" for port in self._ports_left()]
        self.kill_all()
        return (
            f"{GONE_S:.0f} s after the end of the command there was still {', '.join(left)}" if left else None
        )

    def _ports_left(self) -> list[int]:
        return sorted(
            self._ports & listening(one for one in psutil.net_connections("tcp") if one.pid is None)
        )

    # What is done to it

    def pace(self, step_s: float | None) -> None:
        """How long a step is to take; None: as long as it takes."""
        path, beside = self.folder / PACE, self.folder / "pace.new"
        if step_s is None:
            path.unlink(missing_ok=True)
            return
        beside.write_text(str(step_s))
        beside.replace(path)

    def hold(self, but: int) -> None:
        """Remember what is to be gone at the end, and the ranks that will not be disturbed."""
        self._read = events.end(self.run.events)
        self._others = [process for rank, process in self.ranks().items() if rank != but]
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                self._ports |= listening(process.net_connections("tcp"))

    def kill_all(self) -> None:
        """At once, as when the power goes."""
        deadline = time.monotonic() + GONE_S
        while (left := self.left()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()  # so that none sees another one go
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if hasattr(self, "process"):
                self.process.poll()
            time.sleep(POLL_S)


def listening(connections: Iterable[Any]) -> set[int]:
    """The ports of these that wait for somebody."""
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

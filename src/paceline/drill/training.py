"""One training of a drill: start its command, follow its files, and end all processes that it started."""

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

# Environment variables. MARK identifies all processes of a training, also under another parent.
MARK = "PACELINE_DRILL"
NUMBER = "PACELINE_DRILL_COMMAND"  # which command of the training started the process
STEP_S = 0.12  # duration of a step until the fault
SLOW_STEP_S = 1.0  # duration of a step while the drill waits for something
POLL_S = 0.01
GONE_S = 15.0  # how long ranks may take to save and end after their launcher
SAMPLE_LOG, PACE = "samples", "pace"


class UnexpectedCourse(Exception):
    """A training did not take its expected course."""


class Training:
    """A context that kills all processes of the training at its end."""

    def __init__(
        self, folder: Path, run: RunFolder, plan: ResolvedPlan, limit_s: float, env: Mapping[str, str] = {}
    ):
        self.folder, self.run, self.plan, self.limit_s = folder, run, plan, limit_s
        self.noticed: float | None = None  # time of the first symptom, by the monotonic clock
        self.symptom = ""  # as the run reported it
        self._mark, self._env, self._commands = uuid.uuid4().hex, env, 0
        self._ports: set[int] = set()
        self._read = 0
        self._undisturbed: list[psutil.Process] = []
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        if hasattr(self, "process"):
            self.process.wait()

    def start(self, *arguments: str) -> None:
        """Start `paceline ARGUMENTS`, with its output in output-N.txt."""
        self._commands += 1
        env = {**os.environ, **self._env, MARK: self._mark, NUMBER: str(self._commands)}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        """The file with the output of the last command."""
        return self.folder / f"output-{self._commands}.txt"

    def last_line(self) -> str:
        """Return the last line that the last command printed."""
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    # State

    def read_starts(self) -> list[Start]:
        return sample_audit.read_starts(self.folder / SAMPLE_LOG, self.plan)

    def count_starts(self) -> int:
        """Return the number of starts of the ranks, including those without a step left to do."""
        return (
            sum(isinstance(event, Started) for event in events.read(self.run.events))
            if self.run.events.exists()
            else 0
        )

    def count_steps(self) -> int:
        """Return the number of steps since the last start of the ranks."""
        starts = self.read_starts()
        return max(len(updates) for updates in starts[-1].values()) if starts else 0

    def find_ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks that are alive and belong to the present launcher."""
        ranks = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):
                    ranks[int(process.environ()["RANK"])] = process
        return ranks

    def find_processes(self) -> list[psutil.Process]:
        """Return the processes of this training that are alive."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    # Waiting

    def wait_until(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """Wait until the condition holds. Raises UnexpectedCourse after the limit."""
        deadline = time.monotonic() + (limit_s or self.limit_s)
        while not condition():
            if time.monotonic() > deadline:
                raise UnexpectedCourse(
                    f"{what} did not come in {limit_s or self.limit_s:.0f} s; last output: {self.last_line()}"
                )
            time.sleep(poll_s)

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the command has ended."""
        deadline = time.monotonic() + seconds

        def is_over() -> bool:
            self._look_for_symptom()
            return time.monotonic() > deadline or self.process.poll() is not None

        self.wait_until(is_over, "that time")

    def wait_for_step(self, step: int, checkpoints: int) -> None:
        """Wait until a number of steps and of complete checkpoints is reached.

        Steps become slow if the checkpoints are late."""

        def is_reached() -> bool:
            if self.process.poll() is not None:
                raise UnexpectedCourse(
                    f"the command ended with exit status {self.process.returncode} before step {step}; "
                    f"last output: {self.last_line()}"
                )
            has_steps = self.count_steps() >= step
            if has_steps and len(self.run.checkpoints()) < checkpoints:
                self.set_pace(SLOW_STEP_S)
                return False
            return has_steps

        self.wait_until(is_reached, f"step {step}")

    def wait_for_end(self) -> int:
        """Wait for the end of the command and return its exit status."""

        def has_ended() -> bool:
            self._look_for_symptom()
            return self.process.poll() is not None

        self.wait_until(has_ended, "the end of the command")
        return self.process.wait()

    def _look_for_symptom(self) -> None:
        """Record the first symptom of trouble: a report of the run, or the end of an undisturbed rank."""
        if self.noticed is not None or not self.run.events.exists():
            return
        # Read before the events: a rank that is done reports it before it ends.
        has_ended = not all(map(is_alive, self._undisturbed))
        before, self._read = self._read, events.end(self.run.events)
        for event in events.read(self.run.events, before) if self._read > before else ():
            if isinstance(event, Stalled) or (isinstance(event, Failed) and event.what == "run"):
                self.noticed, self.symptom = time.monotonic(), event.message
            elif isinstance(event, Ended):
                has_ended = event.reason == "stopped"
                self._undisturbed = []
        if self.noticed is None and has_ended:
            self.noticed, self.symptom = time.monotonic(), "a rank ended"

    def end_leftovers(self) -> str | None:
        """Kill the processes that remain GONE_S after the command, and return a sentence about them.

        The sentence names open ports as well. Returns None if nothing remains."""

        def is_gone() -> bool:
            self._look_for_symptom()
            return not self.find_processes() and not self._find_open_ports()

        with contextlib.suppress(UnexpectedCourse):
            self.wait_until(is_gone, "the end of all processes", GONE_S, poll_s=0.05)
            return None
        left = [
            f"process {process.pid} ({' '.join(process.cmdline()[-3:])})"
            for process in self.find_processes()
            if is_alive(process)
        ]
        left += [f"port {port} without a process" for port in self._find_open_ports()]
        self.kill_all()
        return (
            f"{GONE_S:.0f} s after the end of the command these remain: {', '.join(left)}" if left else None
        )

    def _find_open_ports(self) -> list[int]:
        connections = [connection for connection in psutil.net_connections("tcp") if connection.pid is None]
        return sorted(self._ports & find_listening_ports(connections))

    # Actions

    def set_pace(self, step_s: float | None) -> None:
        """Set the minimum duration of a step; None: no minimum."""
        path, new = self.folder / PACE, self.folder / "pace.new"
        if step_s is None:
            path.unlink(missing_ok=True)
            return
        new.write_text(str(step_s))
        new.replace(path)

    def record_processes(self, disturbed: int) -> None:
        """Remember the ports that must be closed at the end, and all ranks except the disturbed rank."""
        self._read = events.end(self.run.events)
        self._undisturbed = [process for rank, process in self.find_ranks().items() if rank != disturbed]
        for process in self.find_processes():
            with contextlib.suppress(psutil.Error):
                self._ports |= find_listening_ports(process.net_connections("tcp"))

    def kill_all(self) -> None:
        """Kill all processes at once, as a power failure does."""
        deadline = time.monotonic() + GONE_S
        while (processes := self.find_processes()) and time.monotonic() < deadline:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()  # so that no process can react to the end of another
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if hasattr(self, "process"):
                self.process.poll()
            time.sleep(POLL_S)


def find_listening_ports(connections: Iterable[Any]) -> set[int]:
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

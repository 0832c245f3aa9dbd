"""A node of a study that an agent serves (see `node_agent`)."""

import contextlib
import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import LaunchError
from paceline.launch.spawn import Child

START_S = 180.0  # for an agent to start and import torch on a busy machine
CLOSE_S = 60.0  # for an agent to end its trials
ANSWER_S = 20.0  # for an agent to answer on a busy machine
POLL_S = 0.05
LAST_LINES_S = 2.0  # for reading what an agent printed before its end
LOST = 255  # exit status of a trial whose node was lost


class Connection(Protocol):
    """Lines of text to and from an agent."""

    def send(self, line: str) -> None:
        """Send a line, if the agent is alive."""

    def receive(self) -> list[str]:
        """Return the lines that have arrived since the last call."""

    @property
    def is_alive(self) -> bool: ...

    def describe_end(self) -> str:
        """Return why the agent ended."""

    def close(self) -> None: ...


class RemoteChild:
    """The process of a trial on another node."""

    def __init__(self, node: "RemoteNode", number: int):
        self._node, self.pid = node, number
        self.status: int | None = None

    def poll(self) -> int | None:
        self._node.read_replies()
        if self.status is None and self._node.is_lost:
            self.status = LOST
        return self.status

    def wait(self) -> int | None:
        while self.poll() is None:
            time.sleep(POLL_S)
        return self.status

    def send_signal(self, sig: int, /) -> None:
        self._node.send({"number": self.pid, "signal": sig})


class RemoteNode:
    """Ranks of a node with an agent."""

    def __init__(self, name: str, ranks: int, connection: Connection):
        self.name, self.ranks, self._connection = name, ranks, connection
        self._children: dict[int, RemoteChild] = {}
        self._count = 0
        self._answers = 0
        self._is_silent = False
        self._cores: float | None = None

    @property
    def is_lost(self) -> bool:
        return self._is_silent or not self._connection.is_alive

    def check(self) -> None:
        """Wait for an answer of the agent. Without one, the node is lost.

        The process that connects to the agent may end only minutes after a loss, when Slurm notices it.
        """
        expected, deadline = self._answers + 1, time.monotonic() + ANSWER_S
        self.send({"ping": expected})
        while self._answers < expected and not self.is_lost:
            time.sleep(POLL_S)
            self.read_replies()
            self._is_silent = self._answers < expected and time.monotonic() > deadline

    def wait_until_ready(self) -> float:
        deadline = time.monotonic() + START_S
        while self._cores is None:
            if self.is_lost or time.monotonic() > deadline:
                why = self._connection.describe_end() if self.is_lost else f"no answer in {START_S:.0f} s"
                raise LaunchError(f"the agent on node {self.name} did not start: {why}")
            self.read_replies()
            time.sleep(POLL_S)
        return self._cores

    def start(
        self, run: Path, log: Path, ranks: int, slots: Sequence[int], hosts: Sequence[str] = ()
    ) -> Child:
        self._count += 1
        child = self._children[self._count] = RemoteChild(self, self._count)
        request = {"run": str(run), "log": str(log), "ranks": ranks, "slots": list(slots)}
        self.send({"number": self._count, **request, "hosts": list(hosts)})
        return child

    def watch(self, child: Child) -> int | None:
        return None  # the agent reports its end

    def send(self, request: dict[str, Any]) -> None:
        self._connection.send(json.dumps(request))

    def read_replies(self) -> None:
        """Note what the agent has reported."""
        for line in self._connection.receive():
            reply = json.loads(line)
            if "cores" in reply:
                self._cores = reply["cores"]
            elif "pong" in reply:
                self._answers = reply["pong"]
            elif "ended" in reply:
                self._children.pop(reply["ended"]).status = reply["status"]
            elif "failed" in reply:
                self._children.pop(reply["failed"])
                raise LaunchError(
                    f"node {self.name} cannot write {reply['message']}; the folder of the study must be on "
                    "a file system that all nodes share"
                )

    def close(self) -> None:
        self._connection.close()


class ProcessConnection:
    """A connection to an agent that a command starts, such as srun."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the controller, which stops the trials
        )
        self._lines: deque[str] = deque()
        self._errors: deque[str] = deque(maxlen=20)
        self._readers = [
            threading.Thread(target=_read, args=(stream, lines), daemon=True)
            for stream, lines in ((self._process.stdout, self._lines), (self._process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def receive(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def describe_end(self) -> str:
        for reader in self._readers:  # the last lines may not have been read yet
            reader.join(LAST_LINES_S)
        said = [line for line in self._errors if line.strip()]
        return said[-1].strip() if said else f"exit status {self._process.returncode}"

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _read(stream: Any, lines: deque[str]) -> None:
    with stream, contextlib.suppress(ValueError, OSError):
        lines.extend(stream)

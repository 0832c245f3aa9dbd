"""PMI-1, with which ranks of MPICH's launcher exchange strings.

The launcher leaves a socket open for each rank; messages are lines of key=value.
"""

import atexit
import contextlib
import os
import re
import socket
from functools import cache

from paceline.errors import LaunchError


class PmiClient:
    """A connection to the launcher of this process.

    fd: PMI_FD.
    timeout_s: for each answer, including the answer that all ranks have reached a barrier.
    """

    def __init__(self, fd: int, timeout_s: float):
        # A copy of the descriptor: the task may use an MPI, which needs the original.
        connection = socket.socket(fileno=os.dup(fd))
        connection.settimeout(timeout_s)
        self._lines = connection.makefile("rw", buffering=1)
        self._ask("init pmi_version=1 pmi_subversion=1")
        self._space = self._ask("get_my_kvsname")["kvsname"]
        # The launcher takes a rank that ends without "finalize" as failed, and ends all others.
        atexit.register(self._end)

    def put(self, key: str, value: str) -> None:
        """Set a value that the other ranks can read after `barrier`."""
        self._ask(f"put kvsname={self._space} key={key} value={value}")

    def barrier(self) -> None:
        self._ask("barrier_in")

    def get(self, key: str) -> str:
        return self._ask(f"get kvsname={self._space} key={key}")["value"]

    def _ask(self, command: str) -> dict[str, str]:
        try:
            self._lines.write(f"cmd={command}\n")
            line = self._lines.readline()
        except OSError as error:
            raise LaunchError(f"mpiexec did not answer {command.split()[0]!r} of PMI: {error}") from None
        answer = dict(re.findall(r"(\S+?)=(\S*)", line))
        if answer.get("rc", "0") != "0" or "cmd" not in answer:
            raise LaunchError(f"mpiexec answered {line.strip()!r} to {command.split()[0]!r} of PMI")
        return answer

    def _end(self) -> None:
        with contextlib.suppress(LaunchError, ValueError):
            self._ask("finalize")


@cache
def connect_pmi(fd: int, timeout_s: float) -> PmiClient:
    """Return the connection of this process."""
    return PmiClient(fd, timeout_s)

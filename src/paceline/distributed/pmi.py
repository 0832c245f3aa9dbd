"""PMI-1, by which MPICH's launcher lets its ranks exchange a few words: lines of key=value over a socket that it has left open for each."""

import atexit
import contextlib
import os
import re
import socket
from functools import cache

from paceline.errors import LaunchError


class PmiClient:
    """With the launcher of this process. `fd`: PMI_FD; timeout_s: for each answer, among them that all ranks have come to a barrier."""

    def __init__(self, fd: int, timeout_s: float):
        connection = socket.socket(
            fileno=os.dup(fd)
        )  # the descriptor itself is left to the MPI that a task may use
        connection.settimeout(timeout_s)
        self._lines = connection.makefile("rw", buffering=1)
        self._ask("init pmi_version=1 pmi_subversion=1")
        self._space = self._ask("get_my_kvsname")["kvsname"]
        atexit.register(self._end)  # a rank that ends without saying so has failed, and all others are ended

    def put(self, key: str, value: str) -> None:
        """A word for the other ranks, who can read it after `barrier`."""
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
            raise LaunchError(f"mpiexec gave no answer to {command.split()[0]} of PMI: {error}") from None
        answer = dict(re.findall(r"(\S+?)=(\S*)", line))
        if answer.get("rc", "0") != "0" or "cmd" not in answer:
            raise LaunchError(f"mpiexec answered {line.strip()!r} to {command.split()[0]} of PMI")
        return answer

    def _end(self) -> None:
        with contextlib.suppress(LaunchError, ValueError):
            self._ask("finalize")


@cache
def connect_pmi(fd: int, timeout_s: float) -> PmiClient:
    """The one of this process."""
    return PmiClient(fd, timeout_s)

"""The agent of a study on another node: it starts trials there, and reports how they end.

The controller sends lines of JSON to its standard input, and reads lines from its standard output. When its
input ends, the controller is gone: all trials save and end.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from paceline.cluster.limits import measure_free_cores
from paceline.launch.spawn import Child
from paceline.tuning.executors.local_node import LocalNode, warm_server

WORDS = ("-m", "paceline.tuning.executors.node_agent")
POLL_S = 0.05
STOP_S = 40.0  # for trials to save


def main() -> None:
    """Serve a controller: `node_agent RANKS`."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trials and libraries print must not reach the controller
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the trials or the controller, which stop
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore)
    with warm_server() as server, replies:
        node = LocalNode(int(sys.argv[1]), measure_free_cores(), server)
        _reply(replies, {"cores": node.wait_until_ready()})
        serve(node, replies)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Slurm sends SIGTERM to all processes of a step: the trials save and end, and the agent reports it.

    A handler, unlike SIG_IGN, is not inherited by a process that is started.
    """


def serve(node: LocalNode, replies: TextIO) -> None:
    """Carry out requests until the input ends."""
    running: dict[int, Child] = {}
    for request in _read_requests(running, replies):
        _carry_out(request, node, running, replies)
    for child in running.values():
        _send(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while any(child.poll() is None for child in running.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for child in running.values():
        _send(child, signal.SIGKILL)


def _read_requests(running: dict[int, Child], replies: TextIO) -> Iterator[dict[str, Any]]:
    """Yield requests, and report the trials that end in the meantime."""
    rest = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            read = os.read(0, 2**16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from map(json.loads, lines)
        for number, child in list(running.items()):
            if (status := child.poll()) is not None:
                del running[number]
                _reply(replies, {"ended": number, "status": status})


def _carry_out(request: dict[str, Any], node: LocalNode, running: dict[int, Child], replies: TextIO) -> None:
    if "ping" in request:
        _reply(replies, {"pong": request["ping"]})
        return
    number = request["number"]
    if "signal" in request:
        if number in running:
            _send(running[number], request["signal"])
        return
    try:
        running[number] = node.start(
            Path(request["run"]),
            Path(request["log"]),
            request["ranks"],
            request["slots"],
            request["hosts"],
        )
    except OSError as error:  # such as a folder that this node does not see
        _reply(replies, {"failed": number, "message": f"{error.filename}: {error.strerror}"})


def _send(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the controller is gone, and so the input ends
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

"""Inside the fork server: wait for requests, fork, and become the requested process."""

import ctypes
import gc
import os
import socket
import sys
from pathlib import Path

from paceline.launch.fork_server import (
    GO,
    MAX_FILES,
    MAX_REQUEST_BYTES,
    READY,
    ROOM,
    ROOM_BYTES,
    UNSAFE,
    is_safe,
)

ENV_START, ENV_END = 47, 48  # fields of /proc/self/stat, counted after the process name: see proc(5)


def serve(descriptor: int) -> tuple[int, list[int]] | None:
    """Fork processes until the process that requests them ends. The caller has imported what they need.

    Return the process id of the fork server and the descriptors of the request in each forked process, and
    None in the server.
    """
    import torch._dynamo  # noqa: F401 (torch imports it in the first step of every optimizer)

    os.environ.pop(ROOM, None)
    server = os.getpid()
    with socket.socket(fileno=descriptor) as launcher:
        if not is_safe(os.environ, len(os.listdir("/proc/self/task"))):
            launcher.send(UNSAFE)
            return None
        gc.collect()
        gc.freeze()  # so that no collection in a rank writes to the shared pages
        launcher.send(READY)
        while True:
            request, files, *_ = socket.recv_fds(launcher, MAX_REQUEST_BYTES, MAX_FILES)
            if not files:
                return None
            pid = fork_twice()
            if pid is None:
                break
            for file in files:
                os.close(file)
            launcher.send(str(pid).encode())
    log, go, *rest = files
    _become_rank(request, log, go)
    return server, rest


def fork_twice() -> int | None:
    """Fork a process whose parent ends.

    Return its id (0 if there are too many processes), and None in the new process.
    """
    read, write = os.pipe()
    try:
        middle = os.fork()
    except OSError:
        middle = -1
    if not middle:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if not pid:
            os.close(read)
            os.close(write)
            return None
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        pid = int(answer.read() or 0) if middle > 0 else 0
    if middle > 0:
        os.waitpid(middle, 0)  # from here on the launcher is the parent
    return pid


def _become_rank(request: bytes, log: int, go: int) -> None:
    """Turn this process into one as `spawn` starts it: session, standard error, environment, arguments."""
    with os.fdopen(go, "rb") as file:
        if file.read() != GO:
            os._exit(1)
    os.setsid()
    os.dup2(log, 2)
    os.close(log)
    for item in filter(None, os.fsdecode(request).split("\0")):
        name, _, value = item.partition("=")
        os.environ[name] = value
    _publish_environment(request)
    sys.argv = sys.argv[:-1]


def _publish_environment(request: bytes) -> None:
    """Make /proc show these variables as the environment of this process, so that tools recognize the rank.

    /proc shows the memory of the variables at the start of the program. The fork server reserved a part of it
    (ROOM), and only that part is overwritten.
    """
    start, end = find_environment()
    room = len(ROOM) + 1 + ROOM_BYTES
    if (
        len(request) + len(ROOM) + 2 <= room <= end - start
        and ctypes.string_at(start, len(ROOM)) == ROOM.encode()
    ):
        ctypes.memmove(start, (request + b"\0" + ROOM.encode() + b"=").ljust(room, b"-"), room)


def find_environment() -> tuple[int, int]:
    """Return the addresses between which /proc finds the environment of this process."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[ENV_START]), int(fields[ENV_END])

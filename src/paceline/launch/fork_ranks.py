"""The fork server's own part: wait for requests of the launcher, and become the rank that each of them asks for."""

import ctypes
import gc
import os
import socket
import sys
from pathlib import Path

from paceline.launch.fork_server import GO, LONGEST, READY, ROOM, ROOM_BYTES, UNSAFE, is_safe

ENV_START, ENV_END = 47, 48  # in /proc/self/stat, counted after the name of the process: see proc(5)


def serve(descriptor: int) -> int | None:
    """Fork ranks for as long as the launcher lives. Returns in each rank the id of the fork server, and None in the server at its end."""
    import torch._dynamo  # noqa: F401 (torch imports it in the first step of any optimizer)

    import paceline.launch.rank_main  # noqa: F401

    os.environ.pop(ROOM, None)
    server = os.getpid()
    with socket.socket(fileno=descriptor) as there:
        if not is_safe(os.environ, len(os.listdir("/proc/self/task"))):
            there.send(UNSAFE)
            return None
        gc.collect()
        gc.freeze()  # so that no collection in a rank writes to the shared pages
        there.send(READY)
        while True:
            told, files, *_ = socket.recv_fds(there, LONGEST, 2)
            if not files:
                return None
            pid = _fork_twice()
            if pid is None:
                break
            for file in files:
                os.close(file)
            there.send(str(pid).encode())
    _become(told, *files)
    return server


def _fork_twice() -> int | None:
    """Fork a process whose parent ends. Returns its id, 0 where there are too many processes, and None in that process itself."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if not between:
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
        pid = int(answer.read() or 0) if between > 0 else 0
    if between > 0:
        os.waitpid(between, 0)  # from here on the launcher is the parent
    return pid


def _become(told: bytes, log: int, go: int) -> None:
    """Be as the process would be that `spawn` starts."""
    with os.fdopen(go, "rb") as file:
        if file.read() != GO:
            os._exit(1)
    os.setsid()
    os.dup2(log, 2)
    os.close(log)
    for item in os.fsdecode(told).split("\0"):
        name, _, value = item.partition("=")
        os.environ[name] = value
    _show(told)
    sys.argv = sys.argv[:-1]


def _show(told: bytes) -> None:
    """Let the system show these variables as those of this process, by which a rank is known to whoever looks for it.

    It shows the memory where they lay when the program was started. Of that we write the part that we had filled ourselves."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[ENV_START]), int(fields[ENV_END])
    room = len(ROOM) + 1 + ROOM_BYTES
    if (
        len(told) + len(ROOM) + 2 <= room <= end - start
        and ctypes.string_at(start, len(ROOM)) == ROOM.encode()
    ):
        ctypes.memmove(start, (told + b"\0" + ROOM.encode() + b"=").ljust(room, b"-"), room)

"""Commands in processes forked from a parent that has imported torch, which takes longer than most commands.

warm.run([...], cwd, env, out, err, timeout_s) -> exit status, or None after a timeout. The command has a
separate session, folder, environment and files, like a new process. `command.start` starts processes that are
not forked.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path


@functools.cache
def _parent() -> tuple[subprocess.Popen[bytes], socket.socket]:
    client, server = socket.socketpair()
    with server:
        process = subprocess.Popen([sys.executable, __file__], stdin=server, start_new_session=True)
    atexit.register(_end, process, client)
    return process, client


def _end(process: subprocess.Popen[bytes], client: socket.socket) -> None:
    # close() alone does not end the server: data workers that a test left behind hold a copy of the socket
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
    client.close()
    process.wait()


def run(
    words: Sequence[str], at: Path, env: dict[str, str], out: str, err: str, timeout_s: float
) -> int | None:
    """Run `paceline WORDS` to its end. Processes that it started may remain."""
    client = _parent()[1]
    client.sendall(json.dumps([list(words), str(at), env, out, err]).encode() + b"\n")
    pid = _read_number(client)
    client.settimeout(timeout_s)
    try:
        return _read_number(client)
    except TimeoutError:
        client.settimeout(None)
        os.kill(pid, signal.SIGKILL)
        _read_number(client)
        return None
    except BaseException:  # pytest-timeout, Ctrl-C
        os.kill(pid, signal.SIGKILL)
        client.close()
        _parent.cache_clear()
        raise
    finally:
        with contextlib.suppress(OSError):
            client.settimeout(None)


def _read_number(client: socket.socket) -> int:
    return int.from_bytes(client.recv(8), "little", signed=True)


def _serve() -> None:
    import torch._dynamo  # noqa: F401 (the first step of an optimizer imports it)

    import paceline.launch.local
    import paceline.launch.rank_main  # noqa: F401
    from paceline import cli

    for name in cli.COMMANDS:
        cli.load(name)
    gc.collect()
    gc.freeze()  # so that memory pages stay shared with children
    server = socket.socket(fileno=0)
    for line in server.makefile("rb"):
        words, at, env, out, err = json.loads(line)
        child = os.fork()
        if not child:
            break
        server.sendall(child.to_bytes(8, "little", signed=True))
        server.sendall(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]).to_bytes(8, "little", signed=True))
    else:
        return
    os.setsid()
    for descriptor, path, flags in (
        (1, out, os.O_WRONLY | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_APPEND),
        (0, os.devnull, os.O_RDONLY),
    ):
        file = os.open(path, flags)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(at)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["paceline", *words]
    sys.path[0] = at
    status = 0
    try:
        cli.main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else error.code is not None
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # skip the slow teardown of imported modules


if __name__ == "__main__":
    _serve()

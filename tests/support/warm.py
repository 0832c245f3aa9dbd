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
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen([sys.executable, __file__], stdin=there, start_new_session=True)
    atexit.register(_end, process, here)
    return process, here


def _end(process: subprocess.Popen[bytes], here: socket.socket) -> None:
    # close() alone does not end the server: data workers that a test left behind hold a copy of the socket
    with contextlib.suppress(OSError):
        here.shutdown(socket.SHUT_RDWR)
    here.close()
    process.wait()


def run(
    words: Sequence[str], at: Path, env: dict[str, str], out: str, err: str, timeout_s: float
) -> int | None:
    """Run `paceline WORDS` to its end. Processes that it started may remain."""
    here = _parent()[1]
    here.sendall(json.dumps([list(words), str(at), env, out, err]).encode() + b"\n")
    pid = _read_number(here)
    here.settimeout(timeout_s)
    try:
        return _read_number(here)
    except TimeoutError:
        here.settimeout(None)
        os.kill(pid, signal.SIGKILL)
        _read_number(here)
        return None
    except BaseException:  # pytest-timeout, Ctrl-C
        os.kill(pid, signal.SIGKILL)
        here.close()
        _parent.cache_clear()
        raise
    finally:
        with contextlib.suppress(OSError):
            here.settimeout(None)


def _read_number(here: socket.socket) -> int:
    return int.from_bytes(here.recv(8), "little", signed=True)


def _serve() -> None:
    import torch._dynamo  # noqa: F401 (by the first step of an optimizer)

    import paceline.launch.local
    import paceline.launch.rank_main  # noqa: F401
    from paceline import cli

    for name in cli.COMMANDS:
        cli.load(name)
    gc.collect()
    gc.freeze()  # so that the pages stay shared
    there = socket.socket(fileno=0)
    for line in there.makefile("rb"):
        words, at, env, out, err = json.loads(line)
        child = os.fork()
        if not child:
            break
        there.sendall(child.to_bytes(8, "little", signed=True))
        there.sendall(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]).to_bytes(8, "little", signed=True))
    else:
        return
    os.setsid()
    for to, path, flags in (
        (1, out, os.O_WRONLY | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_APPEND),
        (0, os.devnull, os.O_RDONLY),
    ):
        file = os.open(path, flags)
        os.dup2(file, to)
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
    os._exit(status)  # without taking everything apart that was imported


if __name__ == "__main__":
    _serve()

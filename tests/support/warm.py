"""Commands in processes forked from a parent that has imported torch, which takes longer than most commands.

warm.start([...], cwd, env, out, err) -> a child of this process, with the methods of `subprocess.Popen`

The command has a session, folder, environment and files of its own, like a new process. Its fork server
(paceline.launch.fork_server) is forked too, before the command imports any user code.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paceline.launch import fork_server
from paceline.launch.fork_server import ROOM, ROOM_BYTES, Forked, adopt_descendants
from paceline.launch.spawn import Child

# This variable finds all processes that a command started, even if they have another parent by now.
MARK = "PACELINE_TESTS"
MARK_BYTES = 32
MAX_REQUEST_BYTES = 2**17
# Commands that may start a fork server
WITH_RANKS = (
    "tune",
    "train",
    "resume",
    "verify",
    "bench",
    "profile",
    "evaluate",
    "generate",
    "predict",
    "launcher",
)
# What commands and ranks import later, in functions. Together it takes longer than many commands.
IMPORTED_LATER = (
    "encodings.idna",
    "numpy.ma",
    "paceline.cli.options.launching",
    "paceline.cli.options.plan_inputs",
    "paceline.debug.diff",
    "paceline.inspect.report.write",
    "paceline.launch.check_launch",
    "paceline.launch.evaluate_run",
    "paceline.launch.launchers",
    "paceline.launch.slurm.srun",
    "paceline.parallel.data_parallel.shard_units",
    "paceline.parallel.pipeline.buffers",
    "paceline.parallel.tensor.apply",
    "paceline.plan.report.explain",
    "paceline.plan.report.plan",
    "paceline.plan.search.ranking",
    "paceline.plan.search.scaling",
    "paceline.preflight.checks",
    "paceline.report.figure_files",
    "paceline.report.mlflow_process",
    "paceline.report.profile",
    "paceline.report.tensorboard.scalar_writer",
    "paceline.training.checkpoint.stored",
    "paceline.training.dry_run.checkpoint_size",
    "paceline.training.evaluation.evaluate_checkpoint",
    "paceline.training.planning.auto_plan",
    "paceline.training.planning.replan",
    "paceline.verify.run",
    "rich.traceback",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "typer.rich_utils",
)
POLL_S = 0.005


class Process:
    """A running command. Its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str]):
        self.pid, self.args = pid, args
        self._child = Forked(pid)

    @property
    def returncode(self) -> int | None:
        return self._child.poll()

    def poll(self) -> int | None:
        return self._child.poll()

    def send_signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            status = self._child.wait()
            assert status is not None
            return status
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(POLL_S)
        return status


# In the tests


@functools.cache
def _parent() -> socket.socket:
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # OpenBLAS would start threads, which a fork loses.
    environ = {ROOM: "-" * ROOM_BYTES, MARK: "0" * MARK_BYTES, **os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with server:
        process = subprocess.Popen(
            [sys.executable, __file__], stdin=server, env=environ, start_new_session=True
        )
    atexit.register(_end, process, client)
    return client


def _end(process: subprocess.Popen[bytes], client: socket.socket) -> None:
    # close() alone does not end the parent: data workers that a test left behind hold a copy of the socket
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
    client.close()
    process.wait()


def start(words: Sequence[str], at: Path, env: Mapping[str, str], out: str, err: str) -> Process:
    """Start `paceline WORDS`, whose output is appended to the files `out` and `err`.

    `python FILE` runs a script instead. The processes that it starts are forks, too.
    """
    request = json.dumps([list(words), str(at), dict(env), out, err]).encode()
    assert len(request) < MAX_REQUEST_BYTES
    with adopt_descendants():
        _parent().send(request)
        pid = int(_parent().recv(MAX_REQUEST_BYTES))
    return Process(pid, ["paceline", *words])


# In the parent of all commands


def _serve() -> None:
    import torch._dynamo  # noqa: F401 (the first step of an optimizer imports it)

    import paceline.launch.local
    import paceline.launch.rank_main
    import paceline.launch.supervise  # noqa: F401
    from paceline import cli
    from paceline.launch.fork_ranks import fork_twice

    for name in cli.COMMANDS:
        cli.load(name)
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] (torch's take longer than most commands)
    gc.collect()
    gc.freeze()  # so that memory pages stay shared with children
    os.environ.pop("OPENBLAS_NUM_THREADS")
    with socket.socket(fileno=os.dup(0)) as server:
        while request := server.recv(MAX_REQUEST_BYTES):
            pid = fork_twice()
            if pid is None:
                break
            server.send(str(pid).encode())
        else:
            return
    _run_command(*json.loads(request))


def _run_command(words: list[str], at: str, env: dict[str, str], out: str, err: str) -> NoReturn:
    from paceline import cli

    for descriptor, path, flags in (
        (1, out, os.O_WRONLY | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_APPEND),
        (0, os.devnull, os.O_RDONLY),
    ):
        file = os.open(path, flags)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(at)
    _publish_mark(env.get(MARK, ""))
    if words[:1] == ["python"]:
        source = Path(at, words[1]).read_text()
        if "paceline.spawn(" in source or "paceline.evaluate(" in source:
            _prepare_fork_server(at)
        for _ in range(source.count("paceline.train(")):
            _prepare_launcher(at)
        _run(functools.partial(runpy.run_path, words[1], run_name="__main__"), words[1:], at, env)
    if words and words[0] in WITH_RANKS:
        _prepare_fork_server(at)
    _run(cli.main, [sys.argv[0], *words], at, env)


def _run(main: Callable[[], None], words: list[str], at: str, env: Mapping[str, str]) -> NoReturn:
    """Run `main` to its end as the main function of this process."""
    os.setsid()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch set it when it was imported
    os.environ.clear()
    os.environ.update(env)
    if inductor is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", inductor)
    tempfile.tempdir = None  # a new process would read TMPDIR
    sys.argv = words
    sys.path[0] = at
    status = 0
    try:
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else error.code is not None
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = status or 120  # like a new process
    os._exit(status)  # skip the slow teardown of imported modules


def _publish_mark(mark: str) -> None:
    """Make /proc show the mark in the environment of this process and of those that it forks."""
    from paceline.launch.fork_ranks import find_environment

    start, end = find_environment()
    at = ctypes.string_at(start, end - start).index(f"\0{MARK}=".encode()) + len(MARK) + 2
    ctypes.memmove(start + at, mark.encode().ljust(MARK_BYTES, b"0"), MARK_BYTES)


def _fork(become: Callable[[socket.socket, str], NoReturn], at: str) -> tuple[socket.socket, int]:
    """Fork a process that calls `become`. Return a socket to it, and its id."""
    mine, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        mine.close()
        become(remote, at)
    remote.close()
    return mine, pid


def _prepare_launcher(at: str) -> None:
    """Fork a process that becomes the launcher of `paceline.train`, or ends with this process."""
    from paceline.launch import train_run

    mine, pid = _fork(_become_launcher, at)
    start_new_command = train_run._start_command

    def start_command(words: Sequence[str], environ: Mapping[str, str]) -> Child:
        train_run._start_command = start_new_command
        with mine:
            mine.send(json.dumps([words, dict(environ)]).encode())
        return Forked(pid)

    train_run._start_command = start_command


def _become_launcher(requests: socket.socket, at: str) -> NoReturn:
    from paceline import cli

    with requests:
        request = requests.recv(MAX_REQUEST_BYTES)
    if not request:
        os._exit(0)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    words, environ = json.loads(request)
    _prepare_fork_server(at)
    _run(cli.main, [sys.argv[0], *words], at, environ)


def _prepare_fork_server(at: str) -> None:
    """Fork a process that becomes the fork server of this command, or ends with it."""
    mine, pid = _fork(_become_fork_server, at)

    start_new_process = fork_server._start_process

    def start_process(words: Sequence[str], environ: Mapping[str, str], remote: int, log: int) -> Child:
        fork_server._start_process = start_new_process
        with mine:
            socket.send_fds(mine, [json.dumps([words, dict(environ)]).encode()], [remote, log])
        return Forked(pid)

    fork_server._start_process = start_process


def _become_fork_server(requests: socket.socket, at: str) -> NoReturn:
    import torch

    from paceline import cli
    from paceline.launch import rank_pool
    from paceline.tuning.executors import trial_process

    with requests:
        request, files, *_ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
    if not files:
        os._exit(0)
    [_, module, *words], environ = json.loads(request)
    remote, log = files
    os.dup2(log, 2)
    os.close(log)
    if "OMP_NUM_THREADS" in environ:
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # a new process would read the variable
    mains = {"paceline.launch.rank_pool": rank_pool.main, trial_process.WORDS[1]: trial_process.main}
    main = mains.get(module, cli.main)
    _run(main, [sys.argv[0], *words, str(remote)], at, environ)


if __name__ == "__main__":
    _serve()

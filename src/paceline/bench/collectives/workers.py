"""Start the ranks that measure collectives on this machine, and read their rows.

As a script, this module is a rank. With MPI, mpirun starts the ranks, and they measure the other back ends
too.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from paceline.bench.collectives.alpha_beta import fit_rows
from paceline.bench.collectives.latency import explain_latencies
from paceline.bench.collectives.request import KEYS, CollectiveRequest, algorithm_environ
from paceline.bench.result import Result, Row
from paceline.cluster.limits import usable_cores
from paceline.errors import BenchError, Error, RankError
from paceline.launch.launchers import check_count
from paceline.units import several

POLL_S = 0.05
LOG_LINES = 12  # last lines of the log of a rank that failed
AGENT_ENVIRON = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
NOTE, ERROR = "note", "error"  # keys of lines that are not rows


def build_result(
    request: CollectiveRequest, counts: Sequence[int], local_ranks: int, items: Sequence[Row | str]
) -> Result:
    """Return the result of these rows and notes.

    counts: numbers of ranks. local_ranks: the largest number of ranks on this machine.
    """
    rows = tuple(dict(item) for item in items if not isinstance(item, str))
    notes = list(dict.fromkeys(item for item in items if isinstance(item, str)))
    if local_ranks > (cores := usable_cores()):
        notes.append(
            f"{local_ranks} ranks share {several(cores, 'core')} and wait for each other: "
            "the times are not those of the network"
        )
    settings = request.model_dump(mode="json") | {"ranks": counts[0] if len(counts) == 1 else [*counts]}
    summary = fit_rows(rows)
    return Result(
        kind="collectives",
        settings=settings,
        keys=(*KEYS, "algorithm") if request.algorithms else KEYS,
        rows=rows,
        summary=summary,
        notes=(*notes, *explain_latencies(summary)),
    )


def run_all_workers(request: CollectiveRequest, counts: Sequence[int]) -> Iterator[Row | str]:
    """Measure with each number of ranks and each algorithm, one after the other. Raises as `run_workers`."""
    for ranks in counts:
        for algorithm in request.algorithms or (None,):
            environ = algorithm_environ(algorithm) if algorithm is not None else {}
            with contextlib.closing(run_workers(request, ranks, environ)) as items:
                for item in items:
                    if algorithm is None or isinstance(item, str):
                        yield item
                    else:
                        yield {**item, "algorithm": algorithm}


def run_workers(
    request: CollectiveRequest, ranks: int, environ: Mapping[str, str] = {}
) -> Generator[Row | str]:
    """Start ranks that measure, and yield their rows and notes. Closing the iterator ends the ranks.

    environ: more environment variables of the ranks. Raises BenchError with the error of a rank, RankError
    if a rank fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
        (folder / "found.jsonl").touch()
        with _start_ranks(request, ranks, folder, environ) as processes:
            yield from _follow(folder, processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _start_ranks(
    request: CollectiveRequest, ranks: int, folder: Path, more: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    check_count(ranks)
    command = [sys.executable, "-m", "paceline.bench.collectives.workers", str(folder), str(os.getpid())]
    environ = os.environ | {
        **more,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
    }
    with contextlib.ExitStack() as stack:
        processes = []

        def start(command: list[str], environ: dict[str, str], log: str) -> None:
            output = stack.enter_context(open(folder / log, "wb"))
            processes.append(_start_process(command, environ, output))

        try:
            if "mpi" in request.backends:
                start(_mpirun_command(ranks) + command, environ, "0.log")
            else:
                from paceline.distributed.store import open_store

                store = open_store()
                for rank in range(ranks):
                    start(command, environ | _rank_environ(rank, ranks, store.port), f"{rank}.log")
            yield processes
        finally:
            _end(processes)


def _rank_environ(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank whose store exists already."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        **AGENT_ENVIRON,
    }


def _mpirun_command(ranks: int) -> list[str]:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    # Open MPI binds each of two ranks to one core, which the threads of gloo would have to share.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    return ["mpirun", *options, "-np", str(ranks)]


def _start_process(
    command: list[str], environ: dict[str, str], output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, so that Ctrl-C reaches only the parent, which then ends the ranks."""
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            for target in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    target.kill()
        process.wait()


def _follow(folder: Path, processes: "list[subprocess.Popen[bytes]]") -> Iterator[Row | str]:
    """Yield rows and notes from the file that rank 0 writes, until the processes end. Raises RankError."""
    with open(folder / "found.jsonl") as file:
        while True:
            statuses = [process.poll() for process in processes]
            ended = all(status is not None for status in statuses) or any(statuses)
            yield from _read_lines(file)
            if ended:
                break
            time.sleep(POLL_S)
    if any(statuses):
        failures = {rank: status for rank, status in enumerate(statuses) if status}
        failed = min(failures, key=failures.__getitem__)  # a killed rank first: its status is negative
        lines = (folder / f"{failed}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        status = failures[failed]
        how = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        )
        raise RankError("\n  ".join([f"rank {failed} {how}; last lines of its output:", *lines]))


def _read_lines(file: IO[str]) -> Iterator[Row | str]:
    while line := file.readline():
        while not line.endswith("\n"):  # the line is still being written
            time.sleep(POLL_S)
            line += file.readline()
        item = json.loads(line)
        if ERROR in item:
            raise BenchError(item[ERROR])
        yield item.get(NOTE, item)


def _exit_if_orphaned(launcher: int) -> None:
    """Exit when the launcher is gone: it may be killed, and mpirun does not notice."""
    while psutil.pid_exists(launcher):
        time.sleep(0.5)
    os._exit(1)


def iterate_in_thread(items: Iterator[Row | str]) -> Iterator[Row | str]:
    """Yield the same items, produced by another thread.

    Ctrl-C then reaches this thread even while a collective waits for ranks that are gone.
    """
    done = object()
    passed: queue.SimpleQueue[object] = queue.SimpleQueue()

    def produce() -> None:
        try:
            for item in items:
                passed.put(item)
            passed.put(done)
        except BaseException as error:
            passed.put(error)

    threading.Thread(target=produce, daemon=True).start()
    while (item := passed.get()) is not done:
        if isinstance(item, BaseException):
            raise item
        yield item  # type: ignore[misc]


def _run_rank(folder: Path, launcher: int) -> None:
    threading.Thread(target=_exit_if_orphaned, args=(launcher,), daemon=True).start()
    from paceline.bench.collectives.measure import measure_on_rank
    from paceline.distributed.world import read_world

    me = read_world()
    with open(folder / "found.jsonl", "a") as file:

        def write_line(line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            request = CollectiveRequest.model_validate_json((folder / "request.json").read_text("utf-8"))
            for item in measure_on_rank(request, me, folder):
                if me.rank == 0:
                    write_line({NOTE: item} if isinstance(item, str) else item)
        except Error as error:
            write_line({ERROR: str(error)})
            os._exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))

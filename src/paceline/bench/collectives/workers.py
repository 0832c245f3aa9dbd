"""Start the ranks that measure, on this machine, and follow what they find; as a script, one of them.

Without MPI they are started here; with it mpirun starts them, and they measure the other back ends as well.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

from paceline.bench.collectives.alpha_beta import fits
from paceline.bench.collectives.request import KEYS, CollectiveRequest
from paceline.bench.result import Result, Row
from paceline.cluster.limits import usable_cores
from paceline.errors import BenchError, Error, RankError
from paceline.launch.launchers import check_count
from paceline.units import several

POLL_S = 0.05
LOG_LINES = 12  # of a rank that died
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
NOTE, ERROR = "note", "error"  # keys of lines that are no rows


def result(request: CollectiveRequest, ranks: int, local_ranks: int, found: Sequence[Row | str]) -> Result:
    """From rows and notes, as many as there are. `local_ranks`: on this machine."""
    rows = tuple(dict(one) for one in found if not isinstance(one, str))
    notes = [one for one in found if isinstance(one, str)]
    if local_ranks > (cores := usable_cores()):
        notes.append(
            f"{local_ranks} ranks share {several(cores, 'core')} and wait for one another: times are not those of the network"
        )
    settings = request.model_dump(mode="json") | {"ranks": ranks}
    return Result(
        kind="collectives", settings=settings, keys=KEYS, rows=rows, summary=fits(rows), notes=tuple(notes)
    )


def measured(request: CollectiveRequest, ranks: int) -> Iterator[Row | str]:
    """Rows and notes as they come. Raises the Error of a rank, RankError where one died. Closing it ends the ranks."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
        (folder / "found.jsonl").touch()
        with _started(request, ranks, folder) as processes:
            yield from _follow(folder, processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _started(request: CollectiveRequest, ranks: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    check_count(ranks)
    words = [sys.executable, "-m", "paceline.bench.collectives.workers", str(folder), str(os.getpid())]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as held:
        processes = []

        def start(words: list[str], environ: dict[str, str], log: str) -> None:
            output = held.enter_context(open(folder / log, "wb"))
            processes.append(_process(words, environ, output))

        try:
            if "mpi" in request.backends:
                start(_mpirun(ranks) + words, environ, "0.log")
            else:
                from paceline.distributed.store import open_store

                store = open_store()
                for rank in range(ranks):
                    start(words, environ | _who(rank, ranks, store.port), f"{rank}.log")
            yield processes
        finally:
            _end(processes)


def _who(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank: also that the store is there already."""
    said = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in said.items()} | {"MASTER_ADDR": "127.0.0.1", **AGENT}


def _mpirun(ranks: int) -> list[str]:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    # Bound to a core each, as Open MPI does with two ranks, threads of gloo would share it.
    more = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    return ["mpirun", *more, "-np", str(ranks)]


def _process(words: list[str], environ: dict[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C reaches the parent only, which prints what there is and ends the others."""
    return subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()


def _follow(folder: Path, processes: "list[subprocess.Popen[bytes]]") -> Iterator[Row | str]:
    with open(folder / "found.jsonl") as file:
        while True:
            statuses = [process.poll() for process in processes]
            over = all(status is not None for status in statuses) or any(statuses)
            yield from _lines(file)
            if over:
                break
            time.sleep(POLL_S)
    if any(statuses):
        wrong = {rank: status for rank, status in enumerate(statuses) if status}
        failed = min(wrong, key=wrong.__getitem__)  # a killed one first
        lines = (folder / f"{failed}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        status = wrong[failed]
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with exit status {status}"
        )
        raise RankError("\n  ".join([f"rank {failed} {how}; the end of its output:", *lines]))


def _lines(file: IO[str]) -> Iterator[Row | str]:
    while line := file.readline():
        while not line.endswith("\n"):  # it is still being written
            time.sleep(POLL_S)
            line += file.readline()
        found = json.loads(line)
        if ERROR in found:
            raise BenchError(found[ERROR])
        yield found.get(NOTE, found)


def _leave_if_orphaned(launcher: int) -> None:
    """Who started the ranks may have been killed, and mpirun would not know."""
    while psutil.pid_exists(launcher):
        time.sleep(0.5)
    os._exit(1)


def in_thread(items: Iterator[Row | str]) -> Iterator[Row | str]:
    """The same items, made by another thread: Ctrl-C reaches this one also while a collective waits for ranks that are gone."""
    done = object()
    passed: queue.SimpleQueue[object] = queue.SimpleQueue()

    def make() -> None:
        try:
            for item in items:
                passed.put(item)
            passed.put(done)
        except BaseException as error:
            passed.put(error)

    threading.Thread(target=make, daemon=True).start()
    while (item := passed.get()) is not done:
        if isinstance(item, BaseException):
            raise item
        yield item  # type: ignore[misc]


def _be_a_rank(folder: Path, launcher: int) -> None:
    threading.Thread(target=_leave_if_orphaned, args=(launcher,), daemon=True).start()
    from paceline.bench.collectives.measure import on_rank
    from paceline.distributed.world import read_world

    me = read_world()
    with open(folder / "found.jsonl", "a") as file:

        def tell(line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for found in on_rank(
                CollectiveRequest.model_validate_json((folder / "request.json").read_text("utf-8")),
                me,
                folder,
            ):
                if me.rank == 0:
                    tell({NOTE: found} if isinstance(found, str) else found)
        except Error as error:
            tell({ERROR: str(error)})
            os._exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _be_a_rank(Path(sys.argv[1]), int(sys.argv[2]))

"""The process of a trial, which launches its ranks; and the server from which such processes are forked.

The server has imported PyTorch once. A trial process is forked from it, and forks a copy of itself, still
without user code, that serves as the fork server of its ranks. So neither the launcher of a trial nor its
ranks import PyTorch again.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from paceline.errors import Error
from paceline.launch.fork_server import Forked, RankForkServer, ServerProcess, make_sockets
from paceline.run import open_run

WORDS = ("-m", "paceline.tuning.trial_process")
FAILED = 2


def main() -> None:
    """Be the server: `trial_process server SOCKET`. Be a trial: `trial_process RUN RANKS CALLER`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which stops the trials
    if sys.argv[1:2] == ["server"]:
        import paceline.launch.local
        import paceline.launch.rank_main
        import paceline.launch.supervise  # noqa: F401 (what trials and their ranks need)
        from paceline.launch.fork_ranks import serve

        forked = serve(int(sys.argv[2]))
        if forked is None:
            return
        _, [request] = forked
        with os.fdopen(request, "rb") as file:
            run, ranks, caller = json.loads(file.read())
        status = _launch_with_fork(Path(run), ranks, caller)
    else:
        run, ranks, caller = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        status = _launch(Path(run), ranks, caller, None)
    sys.exit(status)


def _launch_with_fork(run: Path, ranks: int, caller: int) -> int:
    """Fork the fork server of the ranks, then launch them. In a rank, return its exit status."""
    launcher = os.getpid()
    own, remote = make_sockets()
    pid = os.fork()
    if pid:
        remote.close()
        with contextlib.closing(RankForkServer(ServerProcess(own, Forked(pid)))) as server:
            return _launch(run, ranks, caller, server)
    own.close()
    os.setsid()
    from paceline.launch.fork_ranks import serve

    forked = serve(remote.detach())
    if forked is None:
        os._exit(0)
    importer, _ = forked
    from paceline.distributed.world import read_world
    from paceline.launch.rank_main import run_started

    run_started(open_run(run), read_world(), launcher, importer)
    return 0


def _launch(run: Path, ranks: int, caller: int, server: RankForkServer | None) -> int:
    """Train the request of a run and return the exit status. An error is the last line of the output."""
    os.dup2(2, 1)
    threading.Thread(target=_stop_without, args=(caller,), daemon=True).start()
    from paceline.launch import local

    try:
        return local.start(open_run(run), ranks, 0, early=server)
    except Error as error:
        print(f"paceline: {error}", file=sys.stderr)
        return FAILED


def _stop_without(caller: int) -> None:
    """Stop the training when the controller is gone."""
    while os.getppid() == caller:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from paceline.tuning import trial_process

    trial_process.main()

"""Start ranks on this machine."""

from paceline.launch.fork_server import fork_server
from paceline.launch.supervise import attend, end_children
from paceline.launch.worker_processes import here, launch
from paceline.run import RunFolder


def start(run: RunFolder, ranks: int, restarts: int) -> int:
    """Train the request of `run` on so many ranks, showing what happens; returns the exit status.

    A rank that dies is started again with all others, from the last good checkpoint, up to `restarts` times.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    with fork_server(run, ranks) as server:
        kept = {server.pid} if server is not None else ()
        return attend(
            run,
            lambda again, begin: launch(run, here(ranks, server), restarts, again, begin),
            lambda only: end_children(only, kept),
        )

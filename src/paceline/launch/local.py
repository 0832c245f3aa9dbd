"""Start ranks on this machine."""

import contextlib
from pathlib import Path

from paceline.launch.fork_server import RankForkServer, fork_server
from paceline.run import RunFolder


def start(
    run: RunFolder,
    ranks: int,
    restarts: int,
    task_file: Path | None = None,
    early: RankForkServer | None = None,
) -> int:
    """Train the request of `run` on `ranks` ranks, show the progress, and return the exit status.

    If a rank fails, all ranks are restarted from the last complete checkpoint, up to `restarts` times.
    task_file: a task that another process sent (see `launch.sent_task`).
    early: a fork server that was started before the run folder existed.
    Raises the Error that ended the training, or RankError for a rank that ended without an error message.
    """
    has_nsys = run.next_request()[1].nsys
    is_given = early is not None or has_nsys  # nsys starts each rank itself
    with contextlib.nullcontext(early) if is_given else fork_server(run, ranks, task_file) as server:
        # They import torch, while the fork server imports it too.
        from paceline.launch.supervise import kill_children, supervise
        from paceline.launch.worker_processes import launch, use_this_machine

        keep = {server.pid} if server is not None else ()
        return supervise(
            run,
            lambda on_restart, on_start: launch(
                run,
                use_this_machine(ranks, server, task_file, run if has_nsys else None),
                restarts,
                on_restart,
                on_start,
            ),
            lambda only: kill_children(only, keep),
        )

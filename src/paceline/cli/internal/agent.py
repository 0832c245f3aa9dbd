"""paceline agent: starts the ranks of one node of several, and starts them again. Not for people."""

import os
import sys
import traceback
from pathlib import Path

import typer

from paceline.distributed.world import World


def agent(run: Path) -> None:
    """Train the request of a run, or go on with it, as the node that the environment says."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # before torch is there: what befell the store is said in one sentence
    from paceline.cli.internal.rank import is_first
    from paceline.cli.resume import done
    from paceline.distributed.world import read_world
    from paceline.run import open_run

    folder, me = open_run(run), read_world()
    spec, launch = folder.next_request()
    if (step := done(folder, spec)) is not None:
        if me.rank == 0:
            print(f"{folder.path} is done: it was trained to step {step}")
        return
    from paceline.launch.elastic.multi_node import start

    assert launch.ranks is not None
    try:
        status = start(
            folder,
            me,
            launch.ranks // launch.nodes,
            launch.least_nodes or launch.nodes,
            launch.restarts,
            spec.timeout_s,
        )
    except Exception as error:  # the top of an agent
        # who started it may be gone, and with it what it prints
        with open(folder.ranks / f"agent-{me.rank}.log", "a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
        first = is_first(folder, me)
        if me.rank and not first:  # the first agent always says why
            raise typer.Exit(2) from None
        if me.rank:
            _queue_again(me)
        raise
    raise typer.Exit(status)


def _queue_again(me: World) -> None:
    """Where the first node is gone."""
    import contextlib

    from paceline.errors import LaunchError
    from paceline.launch.slurm.client import requeue_without

    job = me.job.partition("-")[0]
    with contextlib.suppress(
        LaunchError
    ):  # no job that can be, or no Slurm in this container: the way out is said
        if me.host is not None and requeue_without(job, me.host):
            print(f"paceline: node {me.host} is gone; job {job} is queued again", file=sys.stderr)

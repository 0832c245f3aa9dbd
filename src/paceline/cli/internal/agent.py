"""paceline agent: start and restart the ranks of one of several nodes. Internal."""

import contextlib
import os
import platform
import re
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from paceline.distributed.world import World
from paceline.errors import LaunchError

NOTE = re.compile(r"\.meet-slurm-[0-9]+(-[0-9]+)*")


def agent(run: Path, note: Annotated[str | None, typer.Option("--join")] = None) -> None:
    """Start and restart the ranks of one node. The environment gives the number of the node.

    note: the name of a file in the run folder, if this node joins the running training of another job.
    """
    # set before torch is imported: Paceline reports errors of the store in one sentence
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from paceline.cli.internal.rank import claim_first_failure
    from paceline.cli.train.resume import find_final_step
    from paceline.distributed.world import read_world
    from paceline.run import open_run

    folder, me = open_run(run), read_world()
    spec, launch = folder.next_request()
    if (final := find_final_step(folder, spec)) is not None:
        if me.rank == 0:
            print(f"{folder.path} is done: {final}")
        return
    if note is not None and not NOTE.fullmatch(note):
        raise LaunchError(f"--join must be the name of a file such as .meet-slurm-12-0-0, got {note!r}")
    from paceline.launch.elastic import multi_node

    try:
        status = (
            multi_node.start(folder, me, launch, spec.timeout_s)
            if note is None
            else multi_node.join(folder, me, launch, spec.timeout_s, note)
        )
    except Exception as error:  # the top of an agent
        # the process that started this agent may be gone, and with it the standard error stream
        name = me.rank if note is None else platform.node()
        with open(folder.ranks / f"agent-{name}.log", "a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
        if note is not None:
            raise typer.Exit(2) from None  # the agent of the first node reports why the training ended
        is_first = claim_first_failure(folder, me)
        if me.rank and not is_first:  # the first agent always reports its error
            raise typer.Exit(2) from None
        if me.rank:
            _requeue_without_node(me)
        raise
    raise typer.Exit(status)


def _requeue_without_node(me: World) -> None:
    """Queue the job again if the first node of the job is lost."""
    from paceline.launch.slurm.client import requeue_without

    job = me.job.partition("-")[0]
    # LaunchError: the job cannot be requeued, or the container has no Slurm. The error of the agent names the
    # fix.
    with contextlib.suppress(LaunchError):
        if me.host is not None and requeue_without(job, me.host):
            print(f"paceline: node {me.host} is lost; job {job} is queued again", file=sys.stderr)

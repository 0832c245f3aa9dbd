"""Start ranks on all nodes of the Slurm allocation that this process is in."""

import os
import signal
import subprocess
import sys
from types import FrameType

from paceline.errors import LaunchError, RankError
from paceline.launch.signals import STOPPED, stop_signals
from paceline.launch.slurm.job_script import ELASTIC, SRUN
from paceline.run import RunFolder
from paceline.spec import Launch


def allocated(nodes: int, least: int | None) -> int:
    """How many of so many nodes there are. Raises LaunchError where they are fewer than the least, or than all if none is said."""
    least = least or nodes
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise LaunchError(
            f"--nodes {nodes} is for a Slurm allocation, and this is none: queue it with paceline submit, "
            f"ask for one with salloc --nodes {nodes}, or train on this machine with --nodes 1"
        )
    got = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if int(got) < least:
        raise LaunchError(
            f"--nodes {least}, but Slurm's job {job} has {got} ({os.environ.get('SLURM_JOB_NODELIST', '?')}): use --nodes {got}"
        )
    return min(int(got), nodes)


def start(run: RunFolder, launch: Launch) -> int:
    """Train the request of `run` on its nodes; rank 0 shows what happens. Returns the exit status.

    Raises RankError where it failed; the ranks have said why.
    """
    assert launch.ranks is not None
    nodes = allocated(launch.nodes, launch.least_nodes)
    if launch.is_elastic:
        words = [*SRUN, *ELASTIC, "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    else:
        words = [
            *SRUN,
            "--overlap",
            f"--nodes={nodes}",
            f"--ntasks={launch.ranks}",
            f"--ntasks-per-node={launch.ranks // nodes}",
        ]
    words += [sys.executable, "-m", "paceline", "agent" if launch.is_elastic else "rank", str(run.path)]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True
    )  # Ctrl-C is for us: srun would take it its own way

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGUSR1)

    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status not in (0, STOPPED):
        raise RankError(f"the ranks of {run.path} ended with exit status {status}, as they say above")
    return status

"""Start ranks on all nodes of the Slurm allocation of this process."""

import os
import signal
import subprocess
import sys
from types import FrameType

from paceline.errors import LaunchError, RankError
from paceline.launch.signals import STOPPED, list_stop_signals
from paceline.launch.slurm.job_script import ELASTIC, SRUN
from paceline.run import RunFolder
from paceline.spec import Launch


def count_allocated_nodes(nodes: int, least: int | None) -> int:
    """Return how many of the requested nodes the allocation has.

    Raises LaunchError for fewer than `least` (default: all).
    """
    least = least or nodes
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise LaunchError(
            f"--nodes {nodes} requires a Slurm allocation; queue the training with paceline submit, "
            f"allocate nodes with salloc --nodes {nodes}, or train on this machine with --nodes 1"
        )
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if int(allocated) < least:
        raise LaunchError(
            f"--nodes must be at most {allocated}, the nodes of Slurm job {job} "
            f"({os.environ.get('SLURM_JOB_NODELIST', '?')}), got {least}; use --nodes {allocated}"
        )
    return min(int(allocated), nodes)


def start(run: RunFolder, launch: Launch, hosts: str | None = None) -> int:
    """Train the request of `run` on the allocated nodes, and return the exit status.

    Rank 0 shows the progress.
    hosts: the names of the nodes, with commas [default: as Slurm chooses].

    Raises RankError if the training failed; the ranks have printed why.
    """
    assert launch.ranks is not None
    nodes = count_allocated_nodes(launch.nodes, launch.least_nodes)
    if launch.is_elastic:
        command = [
            *SRUN,
            *ELASTIC,
            "--overlap",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
        ]
    else:
        command = [
            *SRUN,
            "--overlap",
            f"--nodes={nodes}",
            f"--ntasks={launch.ranks}",
            f"--ntasks-per-node={launch.ranks // nodes}",
        ]
    command += [sys.executable, "-m", "paceline", "agent" if launch.is_elastic else "rank", str(run.path)]
    if hosts is not None:
        command.insert(len(SRUN), f"--nodelist={hosts}")
    # a new session: Ctrl-C goes to this process, since srun would handle it differently
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGUSR1)

    before = {number: signal.signal(number, pass_on) for number in list_stop_signals()}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status not in (0, STOPPED):
        raise RankError(
            f"the ranks of {run.path} ended with exit status {status}; their messages above name the cause"
        )
    return status

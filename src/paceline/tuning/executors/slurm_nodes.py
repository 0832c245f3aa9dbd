"""The nodes of the Slurm allocation of this process, each with an agent that srun starts."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from paceline.errors import LaunchError
from paceline.launch.slurm.job_script import SRUN, check_even_split
from paceline.launch.slurm.srun import count_allocated_nodes
from paceline.tuning.executors.node_agent import WORDS
from paceline.tuning.executors.remote_node import ProcessConnection, RemoteNode


@contextlib.contextmanager
def open_slurm_nodes(nodes: int, ranks: int) -> Iterator[list[RemoteNode]]:
    """Yield nodes with agents, over which the ranks are spread evenly. Raises LaunchError."""
    count_allocated_nodes(nodes, None)
    per_node = check_even_split(ranks, nodes)
    with contextlib.ExitStack() as at_end:
        opened = [_open(name, per_node) for name in _list_hosts()[:nodes]]
        for node in opened:
            at_end.callback(node.close)
        yield opened


def _list_hosts() -> list[str]:
    hosts = os.environ["SLURM_JOB_NODELIST"]
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise LaunchError("scontrol is not installed here, and it names the nodes of a job") from None
    if done.returncode:
        raise LaunchError(f"scontrol cannot read the nodes {hosts}: {done.stderr.strip()}")
    return done.stdout.split()


def _open(host: str, ranks: int) -> RemoteNode:
    place = ("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}")
    command = [*SRUN, *place, sys.executable, *WORDS, str(ranks)]
    return RemoteNode(host, ranks, ProcessConnection(command))

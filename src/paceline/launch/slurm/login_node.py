"""Recognize a machine that can queue jobs of Slurm and is no node of it: a login node."""

import platform
import shutil
import subprocess
from collections.abc import Mapping

ANSWER_S = 3.0


def find_login_node(environ: Mapping[str, str]) -> str | None:
    """Return the name of this machine if it is a login node, else None.

    Outside of a job, a machine is a login node if Slurm answers and does not list it among its nodes.
    """
    if "SLURM_JOB_ID" in environ or shutil.which("sinfo") is None:
        return None
    try:
        done = subprocess.run(
            ["sinfo", "--all", "--noheader", "--Node", "--format=%N %n %o"],  # name, host, address
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    name = platform.node().partition(".")[0]
    nodes = {word.partition(".")[0] for word in done.stdout.split()}
    return None if done.returncode or not nodes or name in nodes else name


def describe_login_node(name: str) -> str:
    """Return a sentence for a user who starts a training on a login node."""
    return (
        f"{name} is not a node of Slurm, so it is probably a login node that others share; "
        "queue the training with paceline submit, or start it in a job: salloc, then paceline train"
    )

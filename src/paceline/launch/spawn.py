"""One rank of ours as a process: what it is told of itself, its command, its log."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def environments(nodes: Sequence[str], host: str, port: int, job: str, attempt: int) -> list[dict[str, str]]:
    """For each rank what torchrun's agent would say to it. `nodes`: that of each rank; host, port: of the store that the launcher keeps."""
    told = []
    for rank, node in enumerate(nodes):
        environ = {
            "RANK": rank,
            "LOCAL_RANK": nodes[:rank].count(node),
            "WORLD_SIZE": len(nodes),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        told.append({name: str(value) for name, value in environ.items()})
    return told


def rank_words(run: Path) -> list[str]:
    """What Python is called with to become a rank of this process."""
    return ["-m", "paceline", "rank", str(run), str(os.getpid())]


def spawn(run: Path, environ: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """A rank, which saves and ends when this process is gone."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, *rank_words(run)],
            env={"OMP_NUM_THREADS": "1"} | os.environ | dict(environ),
            stderr=file,
            start_new_session=True,
        )

"""Start ranks on this machine through torchrun's elastic agent."""

from paceline.launch.attend import RankLogs, attend
from paceline.launch.elastic import run_agent
from paceline.launch.meeting import OneNode
from paceline.launch.processes import here, launch, servers
from paceline.launch.store import LOOPBACK
from paceline.run import RunFolder


def start(run: RunFolder, ranks: int, restarts: int) -> int:
    """Train the request of `run` on so many ranks, showing what happens; returns the exit status.

    A rank that dies is started again with all others, from the last good checkpoint, up to `restarts` times.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    if servers(run):
        return attend(run, lambda again, begin: launch(run, here(ranks), restarts, again, begin))
    return attend(run, lambda again, begin: run_agent(run, ranks, restarts, OneNode(run.path.name), RankLogs(run), again, begin, LOOPBACK))

"""Start ranks on this machine through torchrun's elastic agent."""

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from paceline.launch.attend import RankLogs, attend
from paceline.launch.elastic import run_agent
from paceline.launch.processes import here, launch, servers
from paceline.run import RunFolder


def start(run: RunFolder, ranks: int, restarts: int) -> int:
    """Train the request of `run` on so many ranks, showing what happens; returns the exit status.

    A rank that dies is started again with all others, from the last good checkpoint, up to `restarts` times.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    if servers(run):
        return attend(run, lambda again, begin: launch(run, here(ranks), restarts, again, begin))
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # 0: a free port
        run_id=run.path.name,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
    )
    return attend(
        run,
        lambda again, begin: run_agent(run, ranks, restarts, get_rendezvous_handler(meeting), RankLogs(run), again, begin, "127.0.0.1"),
    )

"""Start ranks on this machine through torchrun's elastic agent."""

import sys

from torch.distributed.launcher.api import LaunchConfig, launch_agent

from paceline.launch.attend import RankLogs, attend
from paceline.launch.processes import here, launch, servers
from paceline.launch.signals import stop_signals
from paceline.launch.spawn import rank_words
from paceline.run import RunFolder


def start(run: RunFolder, ranks: int, restarts: int) -> int:
    """Train the request of `run` on so many ranks, showing what happens; returns the exit status.

    A rank that dies is started again with all others, from the last good checkpoint, up to `restarts` times.
    Raises the Error that ended the training, RankError for a rank that died without one.
    """
    if servers(run):
        return attend(run, lambda: launch(run, here(ranks), restarts))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # 0: a free port
        local_addr="127.0.0.1",
        run_id=run.path.name,
        max_restarts=restarts,
        logs_specs=RankLogs(run),
        signals_to_handle=",".join(number.name for number in stop_signals()),
    )
    return attend(run, lambda: launch_agent(config, sys.executable, rank_words(run.path)))

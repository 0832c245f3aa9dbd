"""The diagnosis of a run at one moment."""

import time
from collections.abc import Container
from dataclasses import replace

from paceline.doctor.diagnose import Diagnosis, diagnose, stall_threshold_s
from paceline.doctor.rank_state import inspect_ranks
from paceline.run import RunFolder


def examine(
    run: RunFolder, threshold_s: float | None = None, failed: Container[int] = ()
) -> Diagnosis | None:
    """Return the diagnosis of a run; None if none of its ranks runs. Takes a few seconds at most.

    threshold_s: seconds without progress after which the run is stuck [default: that for a user's request].
    failed: ranks that reported why they end."""
    ranks = inspect_ranks(run)
    if not any(rank.state in ("runs", "stopped") for rank in ranks):
        return None
    ranks = [
        replace(rank, state="failed") if rank.state == "gone" and rank.rank in failed else rank
        for rank in ranks
    ]
    if threshold_s is None:
        threshold_s = stall_threshold_s([rank.beat for rank in ranks], on_request=True)
    return diagnose(ranks, time.time(), threshold_s)

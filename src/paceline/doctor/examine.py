"""Look at a run once."""

import time
from collections.abc import Container
from dataclasses import replace

from paceline.doctor.diagnose import Diagnosis, bound_s, diagnose
from paceline.doctor.rank_state import ask
from paceline.run import RunFolder


def examine(run: RunFolder, bound: float | None = None, failed: Container[int] = ()) -> Diagnosis | None:
    """What there is to say of a run that goes on, or should; None where no rank of it is there. Takes some seconds at the most.

    bound: seconds without a sign from which on it counts as stuck; None: what is worth a word as somebody asks.
    failed: ranks that have said why they end."""
    seen = ask(run)
    if not any(one.state in ("runs", "stopped") for one in seen):
        return None
    seen = [
        replace(one, state="failed") if one.state == "gone" and one.rank in failed else one for one in seen
    ]
    return diagnose(
        seen, time.time(), bound if bound is not None else bound_s([one.beat for one in seen], soon=True)
    )

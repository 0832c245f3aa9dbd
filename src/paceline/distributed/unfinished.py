"""Collectives that this process has started, as torch's flight recorder has them."""

import json
import sys
import time
from typing import Any

POLL_S = 0.001


def records_collectives() -> bool:
    """Return whether torch's flight recorder has seen a collective of this process."""
    return bool(read_collectives())


def wait_for_collectives(timeout_s: float) -> bool:
    """Wait until gloo's threads have left all collectives that this process started.

    Waiting for the result of a collective is not enough: gloo's thread hands the result over and continues,
    for example to write the time into a profile (torch 2.13). Returns False after the timeout.
    """
    ends = time.monotonic() + timeout_s
    while any(
        not entry["retired"] for entry in read_collectives() if entry["profiling_name"].startswith("gloo:")
    ):
        if time.monotonic() > ends:
            return False
        time.sleep(POLL_S)
    return True


def read_collectives() -> list[Any]:
    """Return the entries of the flight recorder, oldest first. It keeps a limited number of them."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    entries: list[Any] = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
    return entries

"""One rank for a page: its last heartbeat and the end of its output."""

import os
from typing import Any

from paceline.doctor import heartbeat
from paceline.doctor.heartbeat import Heartbeat
from paceline.doctor.rank_state import find_state, read_heartbeats
from paceline.errors import RunError
from paceline.files import open_regular
from paceline.run import RunFolder
from paceline.units import is_whole_number, without_controls

MAX_BYTES = 2**16
MAX_RANKS = 4096  # in the list of all ranks
LIST_S = 1.0  # between two looks at all heartbeats


def list_ranks(run: RunFolder) -> dict[str, Any]:
    """Return the state and phases of each rank of the last start, by the clock of the file system."""
    beats = read_heartbeats(run, offset_s=0.0)
    rows = [
        {"rank": rank, "state": "missing"} if beat is None else _build_row(beat) | {"state": find_state(beat)}
        for rank, beat in enumerate(beats[:MAX_RANKS])
    ]
    problem = f"only the first {MAX_RANKS} of {len(beats)} ranks are shown" if len(beats) > MAX_RANKS else ""
    return {"ranks": rows, "problem": problem}


def read_rank(run: RunFolder, number: str) -> dict[str, Any]:
    """Return host, phase and mean seconds of each phase of a rank, or only a problem: it has no heartbeat."""
    rank = _parse_rank(number)
    path = run.alive(rank)
    beat: Heartbeat | None = None if path.is_symlink() else heartbeat.read(path, Heartbeat)
    if beat is None:
        return {"problem": f"rank {rank} has no heartbeat in {path}"}
    return _build_row(beat)


def _build_row(beat: Heartbeat) -> dict[str, Any]:
    return {
        "rank": beat.rank,
        "host": beat.host,
        "pid": beat.pid,
        "phase": beat.phase,
        "step": beat.step,
        "time": beat.time,
        "spent_s": dict(beat.spent_s),
    }


def read_log(run: RunFolder, number: str) -> str:
    """Return the last 64 KiB of a rank's output, or a sentence if it has none. Raises RunError for links."""
    rank = _parse_rank(number)
    path = run.rank_log(rank)
    try:
        if path.is_symlink():  # the owner of the run may not be the user of the page
            raise RunError(f"{path} is a link; only regular files are shown")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_BYTES))
            data = file.read(MAX_BYTES)
    except FileNotFoundError:  # its launcher keeps the output, or the rank has not started
        return f"rank {rank} has no output in {path}"
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    if size > MAX_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return "\n".join(without_controls(line) for line in data.decode(errors="replace").split("\n"))


def _parse_rank(number: str) -> int:
    if not is_whole_number(number):
        raise RunError("rank must be a number")
    return int(number)

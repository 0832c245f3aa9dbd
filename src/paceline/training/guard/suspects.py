"""The ranks of a run that were found to corrupt data, in a file of the run folder."""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter, ValidationError

from paceline.files import append_whole, open_regular
from paceline.run import RunFolder
from paceline.units import numbered

MAX_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank that held other bits than it should."""

    rank: int
    host: str
    step: int  # after which it was found
    certain: bool  # False: this rank or another rank
    what: str
    time: float = field(default_factory=time.time)  # seconds since the epoch


def record_suspects(run: RunFolder, suspects: Iterable[Suspect]) -> None:
    """Append suspects to the file of the run. A full disk loses them."""
    with contextlib.suppress(OSError):
        file = os.open(run.suspects, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        with contextlib.closing(os.fdopen(file, "wb", buffering=0)):
            for suspect in suspects:
                append_whole(file, (json.dumps(asdict(suspect)) + "\n").encode())


def read_suspects(run: RunFolder) -> list[Suspect]:
    """Return the suspects of a run, oldest first. Lines that cannot be read are skipped."""
    suspects = []
    with contextlib.suppress(OSError), open_regular(run.suspects) as file:
        for line in file.read(MAX_BYTES).splitlines():
            with contextlib.suppress(ValidationError):
                suspects.append(TypeAdapter(Suspect).validate_json(line))
    return suspects


def describe_suspects(run: RunFolder) -> list[str]:
    """Return a sentence on each fault that was found in a run, with its ranks and nodes, oldest first."""
    faults: dict[tuple[int, str], list[Suspect]] = {}
    for suspect in read_suspects(run):
        faults.setdefault((suspect.step, suspect.what), []).append(suspect)
    return [
        f"silent corruption on {' or '.join(sorted({suspect.host for suspect in suspects}))}, "
        f"{numbered('rank', sorted({suspect.rank for suspect in suspects}))}, found after step {step}: {what}"
        for (step, what), suspects in faults.items()
    ]

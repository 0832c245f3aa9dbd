"""Checksums of the files of a checkpoint, and the newest checkpoint of a run that is undamaged."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from paceline.errors import CheckpointError
from paceline.files import open_regular, reason
from paceline.run import RunFolder
from paceline.training.checkpoint.index import Index, read_index


def checksum(path: Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc = size = 0
    with open_regular(path) as file:
        while block := file.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def verify_files(path: Path, index: Index, rank: int = 0, ranks: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if nothing is.

    Of `ranks` each reads a part.
    """
    for name, expected in sorted(index.files.items())[rank::ranks]:
        try:
            found = checksum(path / name)
        except OSError as error:
            return f"{name}: {reason(error)}"
        if found[0] != expected[0]:
            return f"{name} has {found[0]} bytes, {expected[0]} were written"
        if found != expected:
            return f"{name} has another checksum than when it was written"
    return None


def find_last_complete(
    run: RunFolder, rank: int = 0, ranks: int = 1, steps: Sequence[int] | None = None
) -> tuple[Path | None, Index | None, list[str]]:
    """Return the newest complete checkpoint, its index, and a note on each newer one that is damaged.

    steps: of the checkpoints to consider, oldest first [default: all]. A collective: the ranks divide the
    files among themselves.
    """
    notes: list[str] = []
    for step in reversed(steps if steps is not None else run.checkpoints()):
        path = run.checkpoint(step)
        wrong: str | None
        try:
            index = read_index(path)
            wrong = verify_files(path, index, rank, ranks)
        except CheckpointError as error:
            index, wrong = None, str(error)
        if ranks > 1:
            answers: list[str | None] = [None] * ranks
            dist.all_gather_object(answers, wrong)
            wrong = next((answer for answer in answers if answer), None)
        if wrong is None:
            return path, index, notes
        notes.append(f"checkpoint {path} is damaged and was skipped: {wrong}")
    return None, None, notes

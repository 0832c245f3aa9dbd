"""Check that a file can be written, before anything is measured."""

import os
from pathlib import Path

from paceline.errors import BenchError
from paceline.files import check_target


def check_path(path: Path | None) -> None:
    """Raise BenchError if a file cannot be written to `path`. Call it before measuring."""
    if path is None:
        return
    check_target(path, BenchError)
    if not os.access(path.absolute().parent, os.W_OK):
        raise BenchError(f"cannot write {path}: its folder is read-only; specify another folder")

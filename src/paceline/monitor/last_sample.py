"""The last sample of a file of Paceline that grows, without its history."""

import os
from pathlib import Path

from paceline.errors import RunError
from paceline.files import open_regular, reason
from paceline.monitor.samples import read_samples
from paceline.monitor.table import FilePosition

TAIL_BYTES = 2**16
BLOCK_BYTES = 2**20
SECTION, HEADER = b"\n# paceline samples", b"\ntime [s]"


class LastSample:
    """The values of the last row of a file, by column. Columns with a missing value are left out.

    time: of this row, in seconds since the epoch; None before the first row. node: the name in the file."""

    def __init__(self, path: Path):
        self.path, self.node = path, path.stem
        self.time: float | None = None
        self.values: dict[str, float] = {}
        self._position: FilePosition | None = None

    def refresh(self) -> None:
        """Read what was appended. Raises RunError for an unreadable file."""
        if self._position is None:
            self._position = _find_tail(self.path)
        samples = read_samples(self.path, self._position)
        self._position = samples.position if not samples.restarted else None
        self.node = samples.node or self.node
        if len(samples):
            self.time = samples.time[-1]
            last = {name: values[-1] for name, values in samples.columns.items()}
            self.values = {name: value for name, value in last.items() if value == value}


def _find_tail(path: Path) -> FilePosition:
    """Return a position before the last rows. Raises RunError for an unreadable file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - TAIL_BYTES)
            section = header = 0
            at, before = 0, b"\n"
            while block := file.read(BLOCK_BYTES):
                text = before + block
                for mark in (SECTION, HEADER):
                    found = text.rfind(mark)
                    if found >= 0:
                        position = at - len(before) + found + 1
                        if mark is SECTION:
                            section = position
                        else:
                            header = position
                at += len(block)
                before = text[-len(SECTION) :]
            file.seek(begin)
            rows = begin + file.read(TAIL_BYTES).find(b"\n") + 1 if begin else 0
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    if rows <= max(section, header):
        return FilePosition(section, section)
    return FilePosition(rows, section)

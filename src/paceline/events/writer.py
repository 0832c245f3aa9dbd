"""Append events to a file."""

import contextlib
import os
from pathlib import Path

from paceline.events.json_lines import dumps
from paceline.events.kinds import Event
from paceline.files import append_whole


class EventWriter:
    """A file to which events are appended, each in one write. Several processes may write at a time.

    A full disk loses events, but does not end the run. `lost` is the number of lost events.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.lost = 0
        # A last line without a newline is from a writer that was killed, and would damage the next line. It
        # is ended and not removed, because another process may append a line after it in the meantime.
        size = os.fstat(self._file).st_size
        is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._before = b"\n" if is_torn else b""

    def write(self, event: Event) -> None:
        """Append an event, or count it in `lost` if the write fails."""
        is_written = append_whole(self._file, self._before + (dumps(event) + "\n").encode())
        self._before = b"" if is_written else self._before
        self.lost += not is_written

    def close(self) -> None:
        os.close(self._file)


def append(path: Path, event: Event) -> None:
    """Append one event to a file."""
    with contextlib.closing(EventWriter(path)) as writer:
        writer.write(event)

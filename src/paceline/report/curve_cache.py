"""A local copy of the curves of a long run, so that its events are not parsed again.

The copy is only ever a copy: a file that is damaged, of another version or of another run is ignored and
written again. It is in a folder that only this user can open, as plain numbers.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.files import find_cache_folder, open_regular, replaced
from paceline.report.curves import MAX_BUCKETS, BucketColumn, StepCurves

MIN_BYTES = 2**23  # of events read since the last copy; fewer are parsed in less than a second
MAX_FILE_BYTES = 2**28
MAX_FOLDER_BYTES = 2**29  # the oldest copies are deleted
FORMAT = "paceline-curves-1"
_CHECKED_BYTES = 2**12  # of the beginning and the end of the events


def _find_file(events: Path) -> Path | None:
    folder = find_cache_folder("curves")
    name = hashlib.sha256(os.fsencode(events.absolute())).hexdigest()
    return folder / f"{name}.curves" if folder is not None else None


def _identify(events: Path, position: int) -> str:
    """Return a digest of the beginning of a file and of its bytes before a position."""
    with open_regular(events) as file:
        begin = file.read(min(position, _CHECKED_BYTES))
        file.seek(max(0, position - _CHECKED_BYTES))
        end = file.read(min(position, _CHECKED_BYTES))
    return hashlib.sha256(begin + b"\0" + end).hexdigest()


def save(curves: StepCurves, events: Path, position: int) -> bool:
    """Write a copy of the curves of the events up to a position, and return whether that was possible."""
    path = _find_file(events)
    if path is None:
        return False
    body = b"".join(
        part.tobytes()
        for part in (*curves.arrays, *(part for column in curves.columns.values() for part in column.arrays))
    )
    try:
        header = {
            "position": position,
            "identity": _identify(events, position),
            "size": len(curves),
            "max": MAX_BUCKETS,
            "width": curves.width,
            "time": curves.time,
            "names": list(curves.columns),
            "omitted": sorted(curves.omitted),
            "clock_jumps": curves.clock_jumps,
        }
        content = json.dumps(header).encode() + b"\n" + body
        with replaced(path) as temporary:
            temporary.write_bytes(f"{FORMAT} {hashlib.sha256(content).hexdigest()}\n".encode() + content)
        _delete_oldest(path.parent)
    except (OSError, RunError):  # a full disk: the events are parsed again
        return False
    return True


def _delete_oldest(folder: Path) -> None:
    kept = 0
    entries = [(path, path.lstat()) for path in folder.glob("*.curves")]
    for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime, reverse=True):
        kept += status.st_size
        if kept > MAX_FOLDER_BYTES:
            path.unlink(missing_ok=True)


def load(curves: StepCurves, events: Path) -> int:
    """Fill empty curves from the copy, and return the position in the events to continue from.

    Returns 0, and leaves the curves empty, if there is no copy of these events."""
    path = _find_file(events)
    if path is None:
        return 0
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size > MAX_FILE_BYTES:
                return 0
            first_line, _, content = file.read().partition(b"\n")
        if first_line.decode() != f"{FORMAT} {hashlib.sha256(content).hexdigest()}":
            return 0
        header_line, _, body = content.partition(b"\n")
        header: dict[str, Any] = json.loads(header_line)
        position, size = int(header["position"]), int(header["size"])
        if (
            header["max"] != MAX_BUCKETS
            or position > events.stat().st_size
            or header["identity"] != _identify(events, position)
        ):
            return 0
        columns = {str(name): BucketColumn() for name in header["names"]}
        parts = (*curves.arrays, *(part for column in columns.values() for part in column.arrays))
        if len(body) != sum(size * part.itemsize for part in parts):
            return 0
        jumps = [(int(step), float(seconds)) for step, seconds in header["clock_jumps"]]
        width, time, omitted = int(header["width"]), header["time"], set(header["omitted"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    at = 0
    for part in parts:
        part.frombytes(body[at : at + size * part.itemsize])
        at += size * part.itemsize
    curves.columns, curves.clock_jumps, curves.width = columns, jumps, width
    curves.time, curves.omitted = time, omitted
    return position

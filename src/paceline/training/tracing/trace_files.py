"""Files of traces: one for each rank, and one for all."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.files import open_regular, replaced

COMPRESSION = 1  # of gzip: quick, and the files are a tenth of the text
FIRST_LINE = b'{"traceEvents": [\n'
ALL = "all.json.gz"  # the trace of all ranks
MAX_MERGED_BYTES = 2**26  # of compressed files that are merged


def rank_file(rank: int) -> str:
    """Return the name of the trace of a rank."""
    return f"{rank}.json.gz"


def write_rank_trace(path: Path, events: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the events of a rank, one on each line. Raises RunError if that is not possible.

    events: the first key of each is "ph". facts: what else the file contains.
    """
    # One call for all events takes half the time. Quotes within texts have a backslash before them, so that
    # these characters occur between two events only.
    encoded = json.dumps(list(events), separators=(",", ":"))[1:-1].replace('},{"ph":', '},\n{"ph":')
    text = FIRST_LINE + encoded.encode() + _last_lines(facts)
    with replaced(path) as temporary:
        temporary.write_bytes(gzip.compress(text, COMPRESSION, mtime=0))


def _last_lines(facts: Mapping[str, Any]) -> bytes:
    return b'\n],\n"displayTimeUnit": "ms", "otherData": ' + json.dumps(dict(facts)).encode() + b"}\n"


def merge_traces(folder: Path, ranks: int, facts: Mapping[str, Any]) -> str:
    """Write the trace of all ranks, and return an empty text, or why it was not written.

    Raises RunError if a file cannot be read or written.
    """
    paths = [folder / rank_file(rank) for rank in range(ranks)]
    size = sum(path.stat().st_size for path in paths if path.exists())
    if missing := [path.name for path in paths if not path.exists()]:
        return f"{missing[0]} is missing"
    if size > MAX_MERGED_BYTES:
        return f"the files of the ranks have {size / 2**20:.0f} MiB, and at most 64 MiB are merged"
    with replaced(folder / ALL) as temporary, gzip.open(temporary, "wb", COMPRESSION) as merged:
        merged.write(FIRST_LINE)
        for rank, events in enumerate(map(_read_events, paths)):
            merged.write((b",\n" if rank else b"") + events)
        merged.write(_last_lines(facts))
    return ""


def _read_events(path: Path) -> bytes:
    """Return the lines with the events of a file of `write_rank_trace`."""
    with open_regular(path) as file:
        text = gzip.decompress(file.read())
    return text.removeprefix(FIRST_LINE).rpartition(b"\n],\n")[0]


def describe_failures(failures: Sequence[str | None]) -> str:
    """Return why ranks could not write their traces, or an empty text. failures: by rank."""
    failed = [(rank, why) for rank, why in enumerate(failures) if why is not None]
    return f"rank {failed[0][0]}: {failed[0][1]}" if failed else ""

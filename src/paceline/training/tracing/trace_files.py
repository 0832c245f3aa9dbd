"""Files of traces: one for each rank, and one for all.

A file is one member of gzip, whose deflate stream (RFC 1951) is flushed before and after the events. So the
compressed events of ranks can be joined as they are, and the checksum of the whole follows from theirs.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.errors import RunError
from paceline.files import open_regular, reason, replaced

COMPRESSION = 1  # of gzip: quick, and the files are a tenth of the text
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\x04\xff"  # deflate, without a name and a time (RFC 1952)
FIRST_LINE = b'{"traceEvents": [\n'
SEPARATOR = b",\n"  # between the events of two ranks
ALL = "all.json.gz"  # the trace of all ranks
MAX_MERGED_BYTES = 2**26  # of compressed events that are merged
COPY_BYTES = 2**20


class TextPart(NamedTuple):
    """A part of a text: its CRC-32, and its size in bytes."""

    crc: int
    size: int

    @classmethod
    def of(cls, text: bytes) -> "TextPart":
        return cls(zlib.crc32(text), len(text))

    def join(self, after: "TextPart") -> "TextPart":
        """Return the part that consists of this part and the next."""
        return TextPart(
            _append_zeros(self.crc, after.size) ^ _append_zeros(0, after.size) ^ after.crc,
            self.size + after.size,
        )


def _append_zeros(crc: int, count: int) -> int:
    """Return the CRC-32 of a text after so many zero bytes are appended to it.

    CRC-32 is affine: the difference that the text before makes is the same for all texts of equal size.
    """
    zeros = bytes(min(count, COPY_BYTES))
    for at in range(0, count, COPY_BYTES):
        crc = zlib.crc32(zeros[: count - at], crc)
    return crc


class RankEvents(NamedTuple):
    """Where a file has the compressed events of a rank, in bytes, and what they are."""

    begin: int
    end: int
    text: TextPart


def rank_file(rank: int) -> str:
    """Return the name of the trace of a rank."""
    return f"{rank}.json.gz"


def write_rank_trace(path: Path, events: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> RankEvents:
    """Write the events of a rank, one on each line. Raises RunError if that is not possible.

    events: the first key of each is "ph". facts: what else the file contains.
    """
    # One call for all events takes half the time. Quotes within texts have a backslash before them, so that
    # these characters occur between two events only.
    encoded = json.dumps(list(events), separators=(",", ":"))[1:-1].replace('},{"ph":', '},\n{"ph":')
    lines = encoded.encode()
    last = _last_lines(facts)
    head, body = GZIP_HEADER + _deflate(FIRST_LINE), _deflate(lines)
    text = TextPart.of(lines)
    with replaced(path) as temporary:
        temporary.write_bytes(head + body + _end(last, TextPart.of(FIRST_LINE).join(text)))
    return RankEvents(len(head), len(head) + len(body), text)


def _deflate(text: bytes, mode: int = zlib.Z_FULL_FLUSH) -> bytes:
    """Return a part of a deflate stream, which begins and ends at a byte and needs no part before it."""
    compressor = zlib.compressobj(COMPRESSION, wbits=-zlib.MAX_WBITS)
    return compressor.compress(text) + compressor.flush(mode)


def _end(last: bytes, before: TextPart) -> bytes:
    """Return the last lines and the end of a file. before: the text before these lines."""
    whole = before.join(TextPart.of(last))
    numbers = (whole.crc, whole.size % 2**32)
    return _deflate(last, zlib.Z_FINISH) + b"".join(number.to_bytes(4, "little") for number in numbers)


def _last_lines(facts: Mapping[str, Any]) -> bytes:
    return b'\n],\n"displayTimeUnit": "ms", "otherData": ' + json.dumps(dict(facts)).encode() + b"}\n"


def merge_traces(folder: Path, ranks: Sequence[RankEvents], facts: Mapping[str, Any]) -> str:
    """Write the trace of all ranks, and return an empty text, or why it was not written.

    ranks: what `write_rank_trace` returned on each rank. Raises RunError if the file cannot be written.
    """
    size = sum(events.end - events.begin for events in ranks)
    if size > MAX_MERGED_BYTES:
        return f"the files of the ranks have {size / 2**20:.0f} MiB, and at most 64 MiB are merged"
    text = TextPart.of(FIRST_LINE)
    with replaced(folder / ALL) as temporary, open(temporary, "wb") as merged:
        merged.write(GZIP_HEADER + _deflate(FIRST_LINE))
        for rank, events in enumerate(ranks):
            if rank:
                merged.write(_deflate(SEPARATOR))
                text = text.join(TextPart.of(SEPARATOR))
            _copy(folder / rank_file(rank), events, merged)
            text = text.join(events.text)
        merged.write(_end(_last_lines(facts), text))
    return ""


def _copy(path: Path, events: RankEvents, merged: IO[bytes]) -> None:
    """Append the compressed events of a file. Raises RunError if the file does not have them (yet)."""
    left = events.end - events.begin
    try:
        with open_regular(path) as file:
            file.seek(events.begin)
            while left and (piece := file.read(min(left, COPY_BYTES))):
                merged.write(piece)
                left -= len(piece)
    except FileNotFoundError:
        raise RunError(f"{path.name} is missing") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    if left:
        raise RunError(f"{path.name} is not complete")


def describe_failures(failures: Sequence[str | None]) -> str:
    """Return why ranks could not write their traces, or an empty text. failures: by rank."""
    failed = [(rank, why) for rank, why in enumerate(failures) if why is not None]
    return f"rank {failed[0][0]}: {failed[0][1]}" if failed else ""

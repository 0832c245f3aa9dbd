"""The index of a set of tar shards: names, offsets, sizes and CRC-32 of their files, in one mapped file.

The file has a line of JSON (padded to a multiple of 8 bytes) and the arrays of `ARRAYS`. It contains numbers
and names only, so that reading an index of another user runs none of their code.
"""

import json
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.shards.name_table import Array, NameTable
from paceline.errors import DataError
from paceline.files import open_regular, reason, replaced

INDEX = "shards.index"
UNFINISHED = ".packing"  # a file that is in a folder while `paceline pack` fills it
FORMAT = "paceline-shards-1"
# In the order of the file: of each file, except `samples`, the first file of each sample.
ARRAYS = {"offsets": "<u8", "sizes": "<u8", "ends": "<u8", "samples": "<u8", "crcs": "<u4", "names": "<u1"}
MAX_HEADER_BYTES = 2**26
# As in WebDataset: the name of a sample ends at the first point of the last part of the path.
SAMPLE_NAME = re.compile(rb"((?:.*/)?[^./]+)\.([^/]*)", re.S)


@dataclass(frozen=True)
class Shard:
    """A tar file of a set.

    name      of the file
    files     number of files in it
    bytes     its size
    mtime_ns  when it was changed; 0: not compared, because Paceline wrote it
    """

    name: str
    files: int
    bytes: int
    mtime_ns: int = 0


@dataclass
class FileRows:
    """What the index stores of files, in the order of the shards."""

    names: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of the content in its tar file
    sizes: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)

    def append(self, name: bytes, offset: int, size: int, crc: int) -> None:
        """Append a file."""
        self.names.append(name)
        self.offsets.append(offset)
        self.sizes.append(size)
        self.crcs.append(crc)


def split_sample_name(name: bytes) -> tuple[bytes, str] | None:
    """Return the name of the sample that a file belongs to, and its part: `a/1.seg.png` -> a/1, seg.png.

    None if WebDataset ignores the file: it has no extension, is a hidden file, or is named `__…__`.
    """
    match = SAMPLE_NAME.fullmatch(name)
    if match is None or not match[2] or (name.startswith(b"__") and name.endswith(b"__")):
        return None
    return match[1], os.fsdecode(match[2]).lower()


def group_samples(names: Sequence[bytes], first: int = 0) -> list[int]:
    """Return the number of the first file of each sample of a shard, counted from `first`."""
    begins, current = [], None
    for number, name in enumerate(names, first):
        split = split_sample_name(name)
        if split is not None and split[0] != current:
            current = split[0]
            begins.append(number)
    return begins


def write_index(path: Path, shards: Sequence[Shard], rows: FileRows, packed_from: str = "") -> None:
    """Write the index of shards atomically. packed_from: a digest of what `paceline pack` packed."""
    samples: list[int] = []
    first = 0
    for shard in shards:
        samples += group_samples(rows.names[first : first + shard.files], first)
        first += shard.files
    names = NameTable.build(rows.names)
    arrays: dict[str, Sequence[int] | Array] = {
        "offsets": rows.offsets,
        "sizes": rows.sizes,
        "ends": names.ends,
        "samples": samples,
        "crcs": rows.crcs,
        "names": names.text,
    }
    header = {
        "format": FORMAT,
        "packed_from": packed_from,
        "lengths": {name: len(array) for name, array in arrays.items()},
        "shards": [[shard.name, shard.files, shard.bytes, shard.mtime_ns] for shard in shards],
    }
    line = json.dumps(header).encode()
    line += b" " * (-(len(line) + 1) % 8) + b"\n"
    with replaced(path, DataError) as temporary, open(temporary, "wb") as file:
        file.write(line)
        for name, kind in ARRAYS.items():
            file.write(np.asarray(arrays[name], dtype=kind).tobytes())


class ShardIndex:
    """An index in memory that is mapped from its file, so that opening it takes no time for any length.

    Raises DataError if the file is not an index, or was written only in part.
    """

    def __init__(self, path: Path):
        self.path = path
        header, begin, self._map = _read(path)
        lengths = header["lengths"]
        arrays: dict[str, Array] = {}
        for name, kind in ARRAYS.items():
            arrays[name] = np.frombuffer(self._map, dtype=kind, count=lengths[name], offset=begin)
            begin += arrays[name].nbytes
        self.offsets, self.sizes, self.crcs = arrays["offsets"], arrays["sizes"], arrays["crcs"]
        self.samples = arrays["samples"]
        self.names = NameTable(arrays["names"], arrays["ends"])
        self.packed_from = str(header["packed_from"])
        self.shards = [Shard(*shard) for shard in header["shards"]]
        self.first_files = [0, *accumulate(shard.files for shard in self.shards)]

    @property
    def is_packed(self) -> bool:
        """Whether `paceline pack` wrote the shards."""
        return bool(self.packed_from)

    def find_shard(self, file: int) -> int:
        """Return the number of the shard that has a file."""
        return bisect_right(self.first_files, file) - 1

    def sample_files(self, sample: int) -> tuple[int, int]:
        """Return the first file of a sample, and the file after its last file."""
        first = int(self.samples[sample])
        end = int(self.samples[sample + 1]) if sample + 1 < len(self.samples) else len(self.names)
        return first, min(end, self.first_files[self.find_shard(first) + 1])

    def check_shards(self, folder: Path) -> Iterator[str]:
        """Yield a sentence for each shard of a folder that differs from the index."""
        for shard in self.shards:
            try:
                status = os.stat(folder / shard.name)
            except OSError as error:
                yield f"cannot read the shard {folder / shard.name}: {reason(error)}"
                continue
            if status.st_size != shard.bytes:
                yield (
                    f"the shard {folder / shard.name} has {status.st_size:,} bytes, but {shard.bytes:,} in"
                    f" {self.path}"
                )
            elif shard.mtime_ns and status.st_mtime_ns != shard.mtime_ns:
                yield f"the shard {folder / shard.name} has changed since {self.path} was written"


def _read(path: Path) -> tuple[dict[str, Any], int, mmap.mmap]:
    """Return the header of an index, where its arrays begin, and the mapped file. Raises DataError."""
    try:
        with open_regular(path) as file:
            line = file.readline(MAX_HEADER_BYTES)
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DataError(f"cannot read the index {path}: {reason(error)}; delete it") from error
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ValueError
        lengths = {name: int(header["lengths"][name]) for name in ARRAYS}
        shards = [Shard(*shard) for shard in header["shards"]]
        files = sum(shard.files for shard in shards)
        size = len(line) + sum(np.dtype(kind).itemsize * lengths[name] for name, kind in ARRAYS.items())
        is_whole = min(lengths.values()) >= 0 and len(mapped) == size
        has_all = all(lengths[name] == files for name in ("offsets", "sizes", "ends", "crcs"))
        if not is_whole or not has_all or lengths["samples"] > files or len(line) % 8:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not an index of shards, or is damaged; delete it, and run the command again"
        ) from error
    return header, len(line), mapped

"""SampleStore: contents of samples in the files of a cache folder, which many processes write and read.

    table        a row for each sample: where its content is, its size and checksum; zeros: not stored
    units        8 bytes: the number of units of space that were taken
    chunk-N      contents, one after another, of the process that took unit N

A process takes a unit of space under a lock, and then writes into its own chunk. It writes the row after the
content, so a process that is killed leaves no row. A row that was written only in part, or belongs to
damaged content, fails its checksum: the sample counts as not stored.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from zlib import crc32

from paceline.data.cache.folder import CacheFolder
from paceline.errors import DataError
from paceline.files import reason
from paceline.units import format_bytes

MAGIC = b"paceche1"
HEADER = struct.Struct("<8sQQQ32x")  # magic, samples, limit and unit in bytes
ROW = struct.Struct("<QII")  # place + 1, size, checksum
UNIT_BITS = 40  # of a place: offset in a chunk; the bits above are the number of the chunk
MIN_UNIT, UNITS = 2**16, 256
MAX_SAMPLE_BYTES = 2**32 - 1
COUNTED_ROWS = 2**16


@dataclass(frozen=True)
class StoreUsage:
    """What a store has: samples stored of all, space taken in bytes, its limit, and why no more is stored."""

    stored: int
    samples: int
    used_bytes: int
    limit_bytes: int
    full: str


class SampleStore:
    """Contents of samples by index, in an open folder. Raises DataError if the folder has no room.

    samples: their number. limit_bytes: of the whole folder, if this process is its first user.
    """

    def __init__(self, folder: CacheFolder, samples: int, limit_bytes: int):
        self.folder = folder
        try:
            table = self._open_table(samples, limit_bytes)
        except OSError as error:
            raise DataError(
                f"cannot create a cache of {samples:,} samples in {folder.path}: {reason(error)}; free some"
                " space, or use data.cache=off"
            ) from error
        self._table = table
        self._rows = mmap.mmap(table, 0, prot=mmap.PROT_READ)
        magic, self.samples, self.limit_bytes, self._unit = HEADER.unpack_from(self._rows)
        if magic != MAGIC or self.samples != samples:
            raise DataError(f"{folder.path} is no cache of {samples:,} samples; remove it")
        self._chunks: dict[int, int] = {}
        self._writer = 0  # the process that writes into the chunk; a fork takes another
        self._chunk, self._offset, self._end = -1, 0, 0
        self.is_full = False

    def _open_table(self, samples: int, limit_bytes: int) -> int:
        size = HEADER.size + ROW.size * samples
        with contextlib.suppress(FileNotFoundError):
            return self.folder.open_file("table", os.O_RDWR)
        if size > limit_bytes / 2:
            raise DataError(
                f"a cache of {samples:,} samples needs more than {format_bytes(size)}, but its limit is"
                f" {format_bytes(limit_bytes)}; use a larger data.cache_gib, or data.cache=off"
            )
        temporary = secrets.token_hex(8)
        file = self.folder.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(file, 0, size)
            unit = max(MIN_UNIT, (limit_bytes - size) // UNITS)
            os.pwrite(file, HEADER.pack(MAGIC, samples, limit_bytes, unit), 0)
            with contextlib.suppress(FileExistsError):  # another process was earlier
                os.link(temporary, "table", src_dir_fd=self.folder.folder, dst_dir_fd=self.folder.folder)
        finally:
            os.close(file)
            os.unlink(temporary, dir_fd=self.folder.folder)
        return self.folder.open_file("table", os.O_RDWR)

    def __contains__(self, index: int) -> bool:
        return bool(ROW.unpack_from(self._rows, HEADER.size + ROW.size * index)[0])

    def read(self, index: int) -> bytes | None:
        """Return the content of a sample; None if it is not stored."""
        place, size, checksum = ROW.unpack_from(self._rows, HEADER.size + ROW.size * index)
        if not place:
            return None
        chunk, offset = divmod(place - 1, 1 << UNIT_BITS)
        try:
            content = os.pread(self._open_chunk(chunk), size, offset)
        except OSError:
            return None
        is_whole = len(content) == size and crc32(content, index + 1 & 0xFFFFFFFF) == checksum
        return content if is_whole else None

    def _open_chunk(self, chunk: int) -> int:
        file = self._chunks.get(chunk)
        if file is None:
            file = self._chunks[chunk] = self.folder.open_file(f"chunk-{chunk}", os.O_RDONLY)
        return file

    def write(self, index: int, content: bytes) -> bool:
        """Store the content of a sample, and return whether there was room for it."""
        if self.is_full or len(content) > MAX_SAMPLE_BYTES:
            return False
        try:
            if not self._take(len(content)):
                return False
            if os.pwrite(self._open_writable(), content, self._offset) != len(content):
                raise OSError(0, "the disk is full")
            place = (self._chunk << UNIT_BITS) + self._offset + 1
            row = ROW.pack(place, len(content), crc32(content, index + 1 & 0xFFFFFFFF))
            os.pwrite(self._table, row, HEADER.size + ROW.size * index)
        except OSError as error:
            self._stop(reason(error))
            return False
        self._offset += len(content)
        return True

    def _open_writable(self) -> int:
        if self._chunk not in self._chunks:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._chunks[self._chunk] = self.folder.open_file(f"chunk-{self._chunk}", flags)
        return self._chunks[self._chunk]

    def _take(self, size: int) -> bool:
        """Make room for `size` bytes at the offset, in the present chunk or in a new chunk."""
        if self._writer == os.getpid() and self._offset + size <= self._end:
            return True
        units = max(1, -(-size // self._unit))
        file = self.folder.open_file("units", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            taken = int.from_bytes(os.pread(file, 8, 0), "little")
            if self._used_bytes(taken + units) > self.limit_bytes:
                if units == 1:  # not only this sample is too large
                    self._stop(f"its limit of {format_bytes(self.limit_bytes)} is reached")
                return False
            os.pwrite(file, (taken + units).to_bytes(8, "little"), 0)
        finally:
            os.close(file)
        self._writer, self._chunk, self._offset, self._end = os.getpid(), taken, 0, units * self._unit
        return True

    def _used_bytes(self, units: int) -> int:
        return HEADER.size + ROW.size * self.samples + units * self._unit

    def _stop(self, why: str) -> None:
        """Store nothing more from this process, and leave the reason for the others' reports."""
        self.is_full = True
        with contextlib.suppress(OSError):
            file = self.folder.open_file("full", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(file, why.encode())
            os.close(file)

    def usage(self) -> StoreUsage:
        """Return what is stored."""
        taken, full = (self._read_small(name) for name in ("units", "full"))
        stored = 0
        for begin in range(0, self.samples, COUNTED_ROWS):
            count = min(COUNTED_ROWS, self.samples - begin)
            rows = memoryview(self._rows)[HEADER.size + ROW.size * begin :][: ROW.size * count]
            stored += sum(1 for place, _, _ in ROW.iter_unpack(rows) if place)
            rows.release()
        used_bytes = self._used_bytes(int.from_bytes(taken, "little"))
        return StoreUsage(stored, self.samples, used_bytes, self.limit_bytes, full.decode())

    def _read_small(self, name: str) -> bytes:
        try:
            file = self.folder.open_file(name, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(file, 4096, 0)
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the files, and remove the folder if nobody else uses it."""
        self._rows.close()
        for file in (self._table, *self._chunks.values()):
            os.close(file)
        self._chunks.clear()
        self.folder.close()

"""Files in tar shards, which are read by one pread each."""

import contextlib
import fcntl
import hashlib
import os
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from paceline.data.shards.name_table import NameTable
from paceline.data.shards.read_ahead import ReadAhead, ask
from paceline.data.shards.shard_index import INDEX, UNFINISHED, FileRows, Shard, ShardIndex, write_index
from paceline.errors import DataError
from paceline.files import find_cache_folder, reason

MAX_OPEN_FILES = 512  # shards that a process keeps open
CHUNK_BYTES = 2**22


class ShardFiles:
    """The files of a set of shards: `names`, and `read(i)` for the bytes of one.

    It may be used by several threads and in processes that are forked or spawned.

    path: a folder with tar files, or several tar files. Paceline writes an index of shards that have none:
    as `shards.index` next to them, or in the cache folder of this user if they are not in one folder, or it
    cannot be written. Raises DataError.
    """

    def __init__(self, path: str | Path | Sequence[str | Path]):
        self.folder, paths, self.is_whole_folder = _find_shards(path)
        self._set_index(_open_index(self.folder, paths, self.is_whole_folder))

    def _set_index(self, index: ShardIndex) -> None:
        self.index = index
        self.names: NameTable = index.names
        self._first_files = index.first_files
        # Views give Python's integers, three times as fast as arrays.
        self._offsets, self._sizes = index.offsets.data, index.sizes.data
        self._crcs = index.crcs.data
        self._open: dict[int, int] = {}
        self._ahead: ReadAhead | None = None

    def __getstate__(self) -> dict[str, Any]:  # for spawned processes
        return {"folder": self.folder, "index": self.index.path, "is_whole_folder": self.is_whole_folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder, self.is_whole_folder = state["folder"], state["is_whole_folder"]
        self._set_index(ShardIndex(state["index"]))

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            with contextlib.suppress(OSError):
                os.close(file)

    def read(self, file: int) -> bytes:
        """Return the content of a file. Raises DataError if it is damaged."""
        size = self._sizes[file]
        number = bisect_right(self._first_files, file) - 1
        content = self._pread(number, size, self._offsets[file])
        if len(content) != size or crc32(content) != self._crcs[file]:
            raise self._damage(file, number)
        return content

    def read_many(self, files: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the contents of files, as `read` does, with less work for each."""
        index, contents = self.index, []
        numbers = np.searchsorted(index.first_files, files, side="right") - 1
        rows = (numbers, index.offsets[files], index.sizes[files], index.crcs[files])
        self._ask_ahead(*rows[:3])
        opened = self._open
        for number, offset, size, crc in zip(*(row.tolist() for row in rows), strict=True):
            shard = opened.get(number)
            try:
                content = (
                    os.pread(shard, size, offset) if shard is not None else self._pread(number, size, offset)
                )
            except OSError:
                content = b""  # the same error with its message
            if crc32(content) != crc or len(content) != size:
                return [self.read(each) for each in files.tolist()]
            contents.append(content)
        return contents

    def ask_ahead(self, files: npt.NDArray[Any]) -> None:
        """Let the system read files in the background, which are read next."""
        index, files = self.index, files.astype(np.int64)
        numbers = np.searchsorted(index.first_files, files, side="right") - 1
        self._ask_ahead(numbers, index.offsets[files], index.sizes[files])

    def _ask_ahead(self, *parts: npt.NDArray[Any]) -> None:
        if self._ahead is None:
            self._ahead = ReadAhead(np.array([shard.bytes for shard in self.index.shards]))
        for number, offset, size in self._ahead.choose(*parts):
            if (file := self._find_open(number)) is not None:
                ask(file, offset, size)

    def read_range(self, first: int, end: int) -> list[bytes]:
        """Return the contents of files of one shard that follow each other, by one pread."""
        index = self.index
        if end - first == 1:
            return [self.read(first)]
        begin, last = self._offsets[first], self._offsets[end - 1] + self._sizes[end - 1]
        number = index.find_shard(first)
        data = self._pread(number, last - begin, begin)
        contents = []
        for file in range(first, end):
            at = self._offsets[file] - begin
            content = data[at : at + self._sizes[file]]
            if len(content) != self._sizes[file] or crc32(content) != self._crcs[file]:
                raise self._damage(file, number)
            contents.append(content)
        return contents

    def fingerprint(self) -> str:
        """Return what identifies the content of all files: the index and the sizes of the shards."""
        index = self.index
        status = os.stat(index.path)
        identity = (str(self.folder), status.st_ino, status.st_size, status.st_mtime_ns, index.shards)
        return hashlib.sha256(repr(identity).encode()).hexdigest()

    def _damage(self, file: int, number: int) -> DataError:
        return DataError(
            f"{self.names.decode(file)} in {self.folder / self.index.shards[number].name} is damaged: its"
            f" checksum differs from {self.index.path}; copy or pack the shard again"
        )

    def read_bytes(self, file: int, size: int, offset: int) -> bytes:
        """Return bytes of the shard that has a file, unchecked. offset: in the shard."""
        return self._pread(self.index.find_shard(file), size, offset)

    def _pread(self, number: int, size: int, offset: int) -> bytes:
        file = self._find_open(number)
        try:
            if file is not None:
                return os.pread(file, size, offset)
            file = self._open_shard(number)
            try:
                return os.pread(file, size, offset)
            finally:
                os.close(file)
        except OSError as error:
            path = self.folder / self.index.shards[number].name
            raise DataError(f"cannot read the shard {path}: {reason(error)}") from error

    def _find_open(self, number: int) -> int | None:
        """Return the descriptor of a shard, which stays open; None if too many are open."""
        file = self._open.get(number)
        if file is None and len(self._open) < MAX_OPEN_FILES:
            file = self._open_shard(number)
            other = self._open.setdefault(number, file)
            if other != file:  # another thread opened it
                os.close(file)
                file = other
        return file  # never close one that another thread may be reading

    def _open_shard(self, number: int) -> int:
        path = self.folder / self.index.shards[number].name
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"cannot read the shard {path}: {reason(error)}") from error


def _find_shards(path: str | Path | Sequence[str | Path]) -> tuple[Path, list[Path], bool]:
    """Return the folder of shards, their absolute paths, and whether these are all shards of the folder."""
    if isinstance(path, (str, Path)) and Path(path).is_dir():
        folder = Path(path).resolve()
        if (folder / UNFINISHED).exists():
            raise DataError(f"{folder} is packed only in part; run the same paceline pack again")
        found = sorted(folder.glob("*.tar"))
        if not found:
            compressed = next(iter(sorted(folder.glob("*.tar.*"))), None)
            hint = f"decompress {compressed.name}" if compressed else "specify a folder with tar files"
            raise DataError(f"{folder} has no shards (*.tar); {hint}")
        return folder, found, True
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(each) for each in path]
    if not paths:
        raise DataError("no shards were specified; specify a folder with tar files, or the files")
    for each in paths:
        if not each.is_file():
            raise DataError(f"no such shard: {each}; specify a folder with tar files, or the files")
    absolute = [each.resolve() for each in paths]
    return Path(os.path.commonpath([each.parent for each in absolute])), absolute, False


def _open_index(folder: Path, paths: Sequence[Path], is_whole_folder: bool) -> ShardIndex:
    """Return the index of shards, after it was written if there is none for their present content."""
    names = [str(path.relative_to(folder)) for path in paths]
    beside = folder / INDEX
    if is_whole_folder and beside.exists():
        index = ShardIndex(beside)
        differences = list(index.check_shards(folder))
        if index.is_packed and [shard.name for shard in index.shards] != names:
            differences.append(f"{folder} has {len(names)} shards, but {len(index.shards)} in {beside}")
        if index.is_packed and differences:
            raise DataError(f"{differences[0]}; copy or pack the shards again")
        if not differences and [shard.name for shard in index.shards] == names:
            return index
    with _locked(folder):
        writable = is_whole_folder and os.access(folder, os.W_OK)
        target = beside if writable else _find_cached(folder, names)
        if target.exists():  # another process may have written it
            with contextlib.suppress(DataError):
                index = ShardIndex(target)
                if [shard.name for shard in index.shards] == names and not any(index.check_shards(folder)):
                    return index
        shards, rows = [], FileRows()
        for name in names:
            shards.append(index_shard(folder, name, rows))
        write_index(target, shards, rows)
    return ShardIndex(target)


def _find_cached(folder: Path, names: Sequence[str]) -> Path:
    cache = find_cache_folder("shards")
    if cache is None:
        raise DataError(
            f"cannot write an index of the shards in {folder}, and there is no cache folder that only this"
            " user can open; set XDG_CACHE_HOME"
        )
    digest = hashlib.sha256(os.fsencode("\0".join([str(folder), *names]))).hexdigest()
    return cache / f"{digest}.index"


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    """Let one process of a machine at a time write the index of a folder, where the file system has locks."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def index_shard(folder: Path, name: str, rows: FileRows) -> Shard:
    """Append the regular files of a tar file to `rows`, and return the shard. Raises DataError."""
    path = folder / name
    before = len(rows.names)
    try:
        status = path.stat()
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                if member.issparse():
                    raise DataError(f"{member.name} in {path} is sparse; write the shard without --sparse")
                crc = _checksum(file.fileno(), member.offset_data, member.size, path, member.name)
                rows.append(os.fsencode(member.name), member.offset_data, member.size, crc)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(
            f"cannot read the shard {path}: {reason(error)}; a shard is an uncompressed tar file"
        ) from error
    return Shard(name, len(rows.names) - before, status.st_size, status.st_mtime_ns)


def _checksum(file: int, offset: int, size: int, path: Path, name: str) -> int:
    crc, end = 0, offset + size
    while offset < end:
        data = os.pread(file, min(CHUNK_BYTES, end - offset), offset)
        if not data:
            raise DataError(f"{path} is truncated: it ends inside of {name}; copy the shard again")
        crc = crc32(data, crc)
        offset += len(data)
    return crc

"""The files that `paceline pack` packs, and their division into shards: pure functions of the folders."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.shards.shard_index import split_sample_name
from paceline.errors import DataError
from paceline.files import KINDS, reason

BLOCK_BYTES = 512  # of tar: of a header, and what contents are padded to


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """A file to pack.

    name      in the shards
    path      where it is
    mode      its permissions
    mtime_ns  when it was changed
    """

    name: bytes
    path: bytes
    size: int
    mode: int
    mtime_ns: int

    @property
    def packed_bytes(self) -> int:
        """What it takes in a shard, approximately: long names need more."""
        return BLOCK_BYTES + self.size + -self.size % BLOCK_BYTES


@dataclass
class SourceFiles:
    """Everything to pack.

    files    sorted by name
    folders  the folders by name with their permissions, sorted
    links    number of files that are packed in place of links to them
    """

    files: list[SourceFile] = field(default_factory=list)
    folders: list[tuple[bytes, int]] = field(default_factory=list)
    links: int = 0


@dataclass(frozen=True)
class PlannedShard:
    """A shard to write.

    name     of the tar file
    folders  of `SourceFiles`; only the first shard has them
    digest   of what it will contain, by names, sizes, permissions and times of the files
    """

    name: str
    folders: tuple[tuple[bytes, int], ...]
    files: tuple[SourceFile, ...]
    digest: str


def find_sources(sources: Sequence[Path], out: Path) -> SourceFiles:
    """Return the files below folders, and single files.

    The names are relative to the source if there is one; of several sources they begin with its own name.
    Links to files are followed. Raises DataError for what cannot be packed: links to folders, pipes, devices,
    two sources with the same name, and a source that contains the folder `out`.
    """
    found = SourceFiles()
    prefixes: dict[bytes, Path] = {}
    for source in sources:
        path = os.fsencode(source)
        name = os.path.basename(os.path.abspath(source))
        prefix = os.fsencode(name) if len(sources) > 1 or not source.is_dir() else b""
        if prefix in prefixes:
            raise DataError(f"{prefixes[prefix]} and {source} have the same name {name}; rename one")
        prefixes[prefix] = source
        if not os.path.lexists(path):
            raise DataError(f"no such file or folder: {source}")
        if source.is_dir():
            if out.resolve().is_relative_to(source.resolve()):
                raise DataError(f"{out} is inside of {source}; specify a folder outside of it")
            if prefix:
                found.folders.append((prefix, stat.S_IMODE(os.stat(path).st_mode)))
            _scan(path, prefix + b"/" if prefix else b"", found)
        else:
            found.files.append(_describe(prefix, path, os.path.islink(path), found))
    if not found.files:
        raise DataError(f"{', '.join(map(str, sources))}: no files; specify a folder with files")
    found.files.sort()
    found.folders.sort()
    return found


def _scan(folder: bytes, prefix: bytes, found: SourceFiles) -> None:
    try:
        with os.scandir(folder) as entries:
            listed = list(entries)
    except OSError as error:
        raise DataError(f"cannot read {os.fsdecode(folder)}: {reason(error)}") from error
    for entry in listed:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
            found.folders.append((name, mode))
            _scan(entry.path, name + b"/", found)
        else:
            found.files.append(_describe(name, entry.path, entry.is_symlink(), found))


def _describe(name: bytes, path: bytes, is_link: bool, found: SourceFiles) -> SourceFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {os.fsdecode(path)}: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        what = f"a link to {kind}" if is_link else kind
        raise DataError(f"cannot pack {os.fsdecode(path)}: it is {what}; move it out of the source")
    found.links += is_link
    return SourceFile(name, path, status.st_size, stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime_ns)


def plan_shards(sources: SourceFiles, shard_bytes: int) -> list[PlannedShard]:
    """Return shards of about `shard_bytes`. The files of a sample are in one shard."""
    groups = list(_cut(sources.files, shard_bytes))
    width = max(6, len(str(len(groups) - 1)))
    shards = []
    for number, files in enumerate(groups):
        folders = tuple(sources.folders) if number == 0 else ()
        described = repr((folders, [(file.name, file.size, file.mode, file.mtime_ns) for file in files]))
        digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        shards.append(PlannedShard(f"shard-{number:0{width}}.tar", folders, tuple(files), digest))
    return shards


def _cut(files: Sequence[SourceFile], shard_bytes: int) -> Iterator[list[SourceFile]]:
    shard: list[SourceFile] = []
    size, sample = 0, None
    for file in files:
        split = split_sample_name(file.name)
        is_of_sample = split is not None and split[0] == sample
        if shard and size + file.packed_bytes > shard_bytes and not is_of_sample:
            yield shard
            shard, size = [], 0
        sample = split[0] if split is not None else None
        shard.append(file)
        size += file.packed_bytes
    yield shard

"""Pack many small files into few tar shards with an index: in parallel, to be resumed, and verified."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.data.shards.shard_files import CHUNK_BYTES, index_shard
from paceline.data.shards.shard_index import INDEX, UNFINISHED, FileRows, Shard, ShardIndex, write_index
from paceline.data.shards.source_files import BLOCK_BYTES, PlannedShard, SourceFile, find_sources, plan_shards
from paceline.data.workers import ForkedReaders
from paceline.errors import DataError
from paceline.files import reason
from paceline.monitor.sampler_main import die_with_parent
from paceline.units import format_bytes

DEFAULT_SHARD_BYTES = 2**28
TEMPORARY = r"\.[0-9a-f]{16}\.\w+"  # as `replaced` names files
OWN = re.compile(rf"shard-\d+\.tar|\.shard-\d+\.(tar\.partial|[0-9a-f]{{16}}\.index)|\.packing|{TEMPORARY}")
END_BYTES = 2 * BLOCK_BYTES  # of zeros at the end of a tar file


@dataclass(frozen=True)
class PackResult:
    """What `pack` did.

    files, bytes    that the shards contain, and their contents
    shards          number of shards
    written         number of shards that this call wrote; an earlier one, which was stopped, wrote the others
    inodes_before   files and folders of the sources
    inodes_after    of the packed folder
    links           files that were packed in place of links to them
    """

    files: int
    bytes: int
    shards: int
    written: int
    inodes_before: int
    inodes_after: int
    links: int
    seconds: float


def pack(
    sources: Sequence[Path],
    out: Path,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    workers: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PackResult:
    """Pack files and folders into tar shards in the folder `out`, and return what was done.

    Files are stored byte for byte, sorted by name, with their permissions. Each shard is read again after it
    was written, and compared. If the process is stopped, the same call continues after the shards that are
    complete; nothing else of an unfinished shard is left. on_progress gets the files that are done and all.

    Raises DataError.
    """
    start = time.perf_counter()
    found = find_sources(sources, out)
    shards = plan_shards(found, shard_bytes)
    size = sum(file.size for file in found.files)
    with owned_folder(out):
        missing = _find_missing(out, shards)
        _check_space(out, missing)
        done = len(found.files) - sum(len(shard.files) for shard in missing)
        on_progress(done, len(found.files))
        (out / UNFINISHED).touch()
        try:
            for shard in _write_all(missing, out, workers):
                done += len(shard.files)
                on_progress(done, len(found.files))
        except DataError:
            if os.listdir(out) == [UNFINISHED]:  # no shard is complete
                (out / UNFINISHED).unlink()
            raise
        if not (out / INDEX).exists():
            _join_indices(out, shards)
        (out / UNFINISHED).unlink()
    return PackResult(
        files=len(found.files),
        bytes=size,
        shards=len(shards),
        written=len(missing),
        inodes_before=len(found.files) + len(found.folders),
        inodes_after=len(shards) + 1,
        links=found.links,
        seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def owned_folder(out: Path) -> Iterator[None]:
    """Create the folder if there is none, and let no other process pack into it. Raises DataError.

    After an error, a folder that was created and is empty is removed.
    """
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"cannot create the folder {out}: {reason(error)}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another process packs into {out}; wait for it, or specify another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # it has files
                out.rmdir()
        raise
    finally:
        os.close(lock)


def _part_index(out: Path, shard: PlannedShard) -> Path:
    """Return the path of the index of one shard, which exists once the shard is complete."""
    return out / f".{shard.name.removesuffix('.tar')}.{shard.digest}.index"


def _digest(shards: Sequence[PlannedShard]) -> str:
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()


def _find_missing(out: Path, shards: Sequence[PlannedShard]) -> list[PlannedShard]:
    """Return the shards that an earlier call did not complete, and delete what it left. Raises DataError."""
    entries = sorted(os.listdir(out))
    if INDEX in entries:
        index = ShardIndex(out / INDEX)
        if index.packed_from != _digest(shards):
            raise DataError(
                f"{out} was packed from other files, or by another --shard-size; specify another folder"
            )
        if difference := next(index.check_shards(out), None):
            raise DataError(f"{difference}; delete {out}, and pack again")
        for name in entries:  # of a call that was killed after it had written the index
            if name.startswith(".") and OWN.fullmatch(name):
                (out / name).unlink()
        return []
    if foreign := [name for name in entries if not OWN.fullmatch(name)]:
        raise DataError(f"{out} is not empty: it has {foreign[0]}; specify a new folder")
    complete = [shard for shard in shards if _is_complete(out, shard)]
    kept = {name for shard in complete for name in (shard.name, _part_index(out, shard).name)}
    for name in entries:
        if name not in kept:
            (out / name).unlink()
    return [shard for shard in shards if shard not in complete]


def _is_complete(out: Path, shard: PlannedShard) -> bool:
    try:
        return not any(ShardIndex(_part_index(out, shard)).check_shards(out))
    except DataError:
        return False


def _check_space(out: Path, missing: Sequence[PlannedShard]) -> None:
    needed = sum(file.packed_bytes for shard in missing for file in shard.files)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DataError(
            f"{out} has {format_bytes(free)} free, but the shards need {format_bytes(needed)};"
            " specify a folder on another disk"
        )


def _write_all(shards: Sequence[PlannedShard], out: Path, workers: int) -> Iterator[PlannedShard]:
    """Yield each shard when it is written. Raises DataError."""
    if min(workers, len(shards)) <= 1:
        for shard in shards:
            write_shard(shard, out)
            yield shard
        return
    with ProcessPoolExecutor(
        min(workers, len(shards)), ForkedReaders(), initializer=_begin_worker, initargs=(os.getpid(),)
    ) as pool:
        futures = {pool.submit(write_shard, shard, out): shard for shard in shards}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Let the main process handle Ctrl-C, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def write_shard(shard: PlannedShard, out: Path) -> None:
    """Write a shard and its index, and compare what is on the disk with what was read. Raises DataError."""
    partial = out / f".{shard.name}.partial"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o666), "wb", buffering=2**20) as file:
            rows = _write_tar(file, shard)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # so that the check reads the disk where that is possible
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = FileRows()
        entry = index_shard(out, partial.name, found)
        if found != rows:
            raise DataError(f"{out / shard.name} differs from what was written to it; check the disk")
        partial.replace(out / shard.name)
        whole = Shard(shard.name, entry.files, entry.bytes)
        write_index(_part_index(out, shard), [whole], rows, packed_from=shard.digest)
    except OSError as error:
        raise DataError(f"cannot write {out / shard.name}: {reason(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_tar(file: IO[bytes], shard: PlannedShard) -> FileRows:
    rows, position = FileRows(), 0
    for name, mode in shard.folders:
        member = tarfile.TarInfo(os.fsdecode(name))
        member.type, member.mode = tarfile.DIRTYPE, mode & 0o777
        position += file.write(_header(member))
    for source in shard.files:
        member = tarfile.TarInfo(os.fsdecode(source.name))
        member.size, member.mode, member.mtime = source.size, source.mode, source.mtime_ns // 10**9
        position += file.write(_header(member))
        rows.append(source.name, position, source.size, _copy(source, file))
        position += source.size + file.write(bytes(-source.size % BLOCK_BYTES))
    file.write(bytes(END_BYTES + -(position + END_BYTES) % tarfile.RECORDSIZE))
    return rows


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _copy(source: SourceFile, file: IO[bytes]) -> int:
    """Copy the content of a file, and return its CRC-32. Raises DataError."""
    crc = size = 0
    path = os.fsdecode(source.path)
    try:
        descriptor = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error
    try:
        while size <= source.size:
            try:
                data = os.read(descriptor, min(CHUNK_BYTES, source.size - size + 1))
            except OSError as error:
                raise DataError(f"cannot read {path}: {reason(error)}") from error
            if not data:
                break
            crc, size = zlib.crc32(data, crc), size + len(data)
            file.write(data)
    finally:
        os.close(descriptor)
    if size != source.size:
        raise DataError(f"{path} changed while it was packed; run the command again")
    return crc


def _join_indices(out: Path, shards: Sequence[PlannedShard]) -> None:
    """Write the index of all shards, and delete their own indices."""
    rows, whole = FileRows(), []
    for shard in shards:
        part = ShardIndex(_part_index(out, shard))
        whole += part.shards
        rows.names += list(part.names)
        rows.offsets += part.offsets.tolist()
        rows.sizes += part.sizes.tolist()
        rows.crcs += part.crcs.tolist()
    write_index(out / INDEX, whole, rows, packed_from=_digest(shards))
    for shard in shards:
        _part_index(out, shard).unlink()
